"""docs/checkpoints.md names what the code serves."""

import re
from pathlib import Path

from branchline.linear.checkpoint import document, fp8, metadata, modelopt

TEXT = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_the_table_of_formats():
    found = set().union(*(names(row[0]) for row in table("Formats")))
    algorithms = {*modelopt.ALGORITHMS, "MIXED_PRECISION"}
    assert found == metadata._PARSERS.keys() | algorithms


def test_the_table_of_lists():
    methods = set().union(*(names(row[0]) for row in table("Lists")))
    assert methods == metadata._PARSERS.keys() - {"mxfp8"}


def test_the_names_of_scales():
    rows = {row[0]: row for row in table("Names of tensors, and what they do")}
    told = set().union(*(names(rows[f"`fp8`, {kind}"][2]) for kind in ("fine-grained", "AutoFP8")))
    assert told == set(fp8._NAMES.scale)
    told = set().union(*(names(rows[f"`fp8`, {kind}"][4]) for kind in ("fine-grained", "AutoFP8")))
    assert told == set(fp8._NAMES.input_scale)


def test_numbers():
    assert f"at most {document.LARGEST_FILE // 2**20} MiB" in TEXT
    assert f"own bound, {fp8.FBGEMM_BOUND:g}," in TEXT
