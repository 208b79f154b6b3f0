"""The benchmarks run: on the CPU, and the script for GPUs at toy sizes in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from branchline.core import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR, MXFP8
from branchline.core.oracle import ActivationSemantics
from branchline.fusion.producers.eager import eager_raw

ROOT = Path(__file__).resolve().parent.parent
# The root must not be on sys.path, where core/ or cli/ would import by bare name.
_package = ModuleType("benchmarks")
_package.__path__ = [str(ROOT / "benchmarks")]
sys.modules.setdefault("benchmarks", _package)

from benchmarks.gpu import compiled  # noqa: E402
from benchmarks.gpu.producers import SITES  # noqa: E402
from benchmarks.gpu.summary import summarise  # noqa: E402
from benchmarks.harness import SCALE, eager_codes, random_bf16  # noqa: E402
from benchmarks.render import render  # noqa: E402
from benchmarks.results import Run, machine  # noqa: E402
from benchmarks.side_by_side.__main__ import kept  # noqa: E402


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cpu_benchmarks_run():
    out = run("benchmarks", "--short")
    for part in (
        "relu2",
        "silu_mul",
        "rms_norm[llama]",
        "dual for 1 of 16 rows",
        "absorbed",
        "512 tokens",
    ):
        assert part in out


def test_results_are_written_with_the_machine_they_come_from(tmp_path):
    out = tmp_path / "results.json"
    printed = run("benchmarks", "--short", "--only", "norm", "--only", "matmul", "--out", str(out))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["short"]
    assert found["machine"]["cpu"]
    assert found["machine"]["memory"] > 2**28
    assert f"C kernels on {found['machine']['isa']}" in printed
    results = found["results"]
    assert {line["benchmark"] for line in results} == {"norm", "matmul"}
    assert {line["against"] for line in results} >= {"eager", "clone()", "the faster F.linear"}
    assert all(line["value"] > 0 and line["ratio"] > 0 and line["case"] for line in results)
    assert all((line["aim"] is not None) == (line["benchmark"] == "matmul") for line in results)
    # What is written is what was printed.
    for line in results:
        assert line["case"].split(", ")[0] in printed


@pytest.mark.triton_interpreted
def test_the_gpu_script_runs(tmp_path):
    out = tmp_path / "results.json"
    small = ["--device", "cpu", "--rows", "2", "--columns", "64", "--rounds", "1", "--no-verify"]
    small += ["--tokens", "2", "17", "--weights", "64x128", "--layers", "3x2x32x64"]
    small += ["--only", "producers", "--only", "matmul", "--only", "experts"]
    run("benchmarks.gpu", *small, "--out", str(out))
    results = json.loads(out.read_text(encoding="utf-8"))
    lines, matmuls = results["lines"], results["matmul"]
    assert {line["producer"] for line in lines} == {"triton"}
    assert {line["route"] for line in lines} == {"fused", "dual", "absorbed"}
    assert all(line["microseconds"] > 0 for line in lines)
    triton = {"triton-rowwise", "triton-block"}
    assert {line["kernel"] for line in matmuls} >= triton
    assert {line["rows"] for line in matmuls} == {2, 17}
    assert all(line["microseconds"] > 0 for line in matmuls)
    grouped = results["experts"]
    assert {line["kernel"] for line in grouped} >= triton
    assert {line["tokens"] for line in grouped} == {2, 17}
    assert all(line["microseconds"] > 0 for line in grouped)


def test_the_script_for_gpus_runs_every_part_on_a_cpu(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--dry", "--out", str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    parts = {part["name"]: part for part in summary["parts"]}
    assert set(parts) == {"verify", "producers", "graphs", "routes", "matmul", "experts"}
    assert all(
        part["state"] == "ok" and part["lines"] and part["figures"] for part in parts.values()
    )
    # With what a machine needs to start, eight minutes.
    assert sum(part["budget"] for part in parts.values()) <= 450
    graphs = json.loads((tmp_path / "graphs.json").read_text(encoding="utf-8"))["graphs"]
    assert {(line["policy"], line["captured"]) for line in graphs} == {
        ("dynamic", False),
        ("dual", False),
        ("absorbed", False),
    }
    assert all(line["replays_equal_to_forwards"] == line["swaps"] + 1 for line in graphs)
    routes = json.loads((tmp_path / "routes.json").read_text(encoding="utf-8"))["routes"]
    assert {line["adapters"] for line in routes} == {0, 1, 8}
    lines = json.loads((tmp_path / "producers.json").read_text(encoding="utf-8"))["lines"]
    assert all(line["bytes_moved"] > 0 and line["share_of_bandwidth"] > 0 for line in lines)


def test_a_part_that_is_ended_early_writes_what_it_has(tmp_path):
    out = tmp_path / "matmul.json"
    small = ["--device", "cpu", "--only", "matmul", "--tokens", "1", "--weights"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *small, *["64x128"] * 5000, "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    # A line is kept after it is printed: with the second one, the first is.
    printed = (line for line in process.stdout if "TFLOPS" in line)
    assert next(printed)
    assert next(printed)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    found = json.loads(out.read_text(encoding="utf-8"))
    assert not found["finished"]
    assert found["matmul"]


def test_a_part_that_fails_hides_no_other(tmp_path):
    line = {"scheme": "fp8", "kernel": "k", "microseconds": 2.0, "bfloat16_microseconds": 5.0}
    found = {"device": "a GPU", "matmul": [line, {**line, "microseconds": 1.0}]}
    (tmp_path / "matmul.json").write_text(json.dumps(found), encoding="utf-8")
    (tmp_path / "verify.json").write_text("", encoding="utf-8")
    parts = "verify\t1\t3\t80\nmatmul\t124\t60\t60\nexperts\t0\t9\t55\n"
    (tmp_path / "parts.tsv").write_text(parts, encoding="utf-8")
    summary = summarise(tmp_path)
    assert not summary.ok
    assert summary.device == "a GPU"
    states = {part.name: (part.state, part.lines) for part in summary.parts}
    assert states == {"verify": ("failed", 0), "matmul": ("timed out", 2), "experts": ("ok", 0)}
    assert summary.parts[1].figures == {"fp8 by k": "3.75 (2.50 to 5.00) times bfloat16"}


def test_torch_compile_is_given_the_same_pair():
    for semantics in SITES:
        x, other = random_bf16(7, 64), random_bf16(7, 64, seed=1)
        gated = isinstance(semantics, ActivationSemantics)
        inputs = (x, other) if not gated or semantics.gated else (x,)
        inputs = inputs if gated else (x, other[0])
        for key in (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN):
            plain = compiled.plain(semantics, key, SCALE)
            assert plain is not None
            wanted = eager_codes(eager_raw(semantics, inputs).out, key)
            # A reciprocal that is rounded beforehand may move a code to its neighbour, no further.
            near = (
                plain(*inputs).float() - wanted.float()
            ).abs() <= wanted.float().abs() / 8 + 0.01
            assert near.all(), (semantics, key)
    assert compiled.pair(SITES[0], MXFP8, SCALE) is None


@pytest.fixture
def recorded() -> Run:
    """A short run, as it was written; not of a quiet machine, so it misses aims."""
    text = (ROOT / "benchmarks" / "data" / "short_run.json").read_text(encoding="utf-8")
    return Run.model_validate_json(text)


def test_results_are_rendered_with_plots_and_the_same_bytes_twice(tmp_path, recorded):
    for folder in ("first", "second"):
        render([recorded], tmp_path / folder)
    files = {p.relative_to(tmp_path / "first") for p in (tmp_path / "first").rglob("*.*")}
    names = {result.benchmark for result in recorded.results}
    plots = {Path("images", f"bench-{name}.svg") for name in names}
    assert files == {Path("benchmarks.md"), *plots}
    for file in files:
        first, second = ((tmp_path / folder / file).read_bytes() for folder in ("first", "second"))
        assert first == second, file
    text = (tmp_path / "first" / "benchmarks.md").read_text(encoding="utf-8")
    assert recorded.machine.cpu in text
    assert "figures are rough" in text
    for result in recorded.results:
        assert f"| {result.case} |" in text
        assert f"| {result.ratio:.2f} | {result.against} |" in text
    missed = [r for r in recorded.results if r.aim is not None and r.ratio < r.aim]
    assert text.count("**missed**") == len(missed) > 0
    assert text.count("![") == len(names)
    for plot in plots:
        svg = (tmp_path / "first" / plot).read_text(encoding="utf-8")
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert str(plot) in text
    case = next(r.case for r in recorded.results if r.benchmark == "head")
    assert case in (tmp_path / "first" / "images" / "bench-head.svg").read_text(encoding="utf-8")


def test_a_comparison_takes_the_place_of_its_own_earlier_one_alone(tmp_path, recorded):
    head, *others = recorded.results
    here = recorded.model_copy(update={"machine": machine(), "threads": 2})
    file = tmp_path / "run.json"
    assert kept(file, head, 2) == []
    file.write_text(here.model_dump_json(), encoding="utf-8")
    assert kept(file, head.model_copy(update={"ratio": 9.0}), 2) == others
    elsewhere = head.model_copy(update={"against": "another 1.0"})
    assert kept(file, elsewhere, 2) == [head, *others]
    with pytest.raises(SystemExit, match="2 threads: name another --out"):
        kept(file, head, 1)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match="holds no results"):
        kept(file, head, 2)


def test_a_later_run_replaces_what_it_measured_again(tmp_path, recorded):
    heads = [r for r in recorded.results if r.benchmark == "head"]
    again = [r.model_copy(update={"ratio": 4.56}) for r in heads]
    later = recorded.model_copy(
        update={"results": tuple(again), "short": False, "date": "2031-02-03T04:05:06+00:00"}
    )
    render([recorded, later], tmp_path)
    text = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    section = text[text.index("## Output head") :].partition("\n## ")[0]
    assert section.count("| 4.56 |") == len(again)
    assert "Measured 2031-02-03" in section
    assert text.count("| 4.56 |") == len(again)
    assert "## Not measured\n" in text
