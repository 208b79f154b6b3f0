"""The documents are true: what they name exists, what they show runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer.main
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from branchline.adapters.describe import describe_adapter
from branchline.adapters.tuners import TUNERS, UNSERVED
from branchline.cli import app
from branchline.core.errors import AdapterError
from tests.helpers import make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# A path below the root: "fusion/record.py", "fusion/producers/".
REPOSITORY_PATH = re.compile(r"`([\w.-]+/(?:[\w.-]+/)*[\w.-]*)`")


def prose(text: str) -> str:
    """Without fenced blocks."""
    return FENCE.sub("", text)


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(text) if found == language]


def commands() -> list[list[str]]:
    """Every `branchline ...` line that is shown, as arguments."""
    found = []
    for path in DOCUMENTS:
        for language, body in FENCE.findall(path.read_text(encoding="utf-8")):
            if language in ("", "sh", "bash", "console"):
                joined = body.replace("\\\n", " ")
                lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
                found += [shlex.split(line)[1:] for line in lines if line.startswith("branchline ")]
    return found


def document_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- what is named exists ----------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_id)
def test_links_lead_somewhere(path):
    for target in LINK.findall(prose(path.read_text(encoding="utf-8"))):
        if "://" not in target and not target.startswith("#"):
            assert (path.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_id)
def test_named_files_exist(path):
    for name in REPOSITORY_PATH.findall(prose(path.read_text(encoding="utf-8"))):
        assert (ROOT / name).exists(), name


def test_every_document_is_reached_from_the_readme():
    linked = {(ROOT / target).resolve() for target in LINK.findall(README)}
    assert set(DOCUMENTS) - {ROOT / "README.md"} <= linked


def test_the_readme_names_the_make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):.*##", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake (?:[A-Z]+=\S+ )?([a-z]+)\b(?=[`\s])(?=[^`]*?`|\s+#)", README))
    assert named == targets


def test_the_readme_names_the_folders():
    table = README[README.index("## What lies where") :]
    named = set(re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE))
    packages = {path.parent.name for path in ROOT.glob("[a-z]*/__init__.py")}
    assert packages <= named
    assert {"native", "examples", "benchmarks", "tests", "docs"} <= named


def test_the_invariants_are_all_there_with_code_and_tests():
    rows = re.findall(r"^\| (I\d+) \|[^|]+\|([^|]+)\|([^|]+)\|$", ARCHITECTURE, re.MULTILINE)
    assert [number for number, _, _ in rows] == [f"I{i}" for i in range(1, 15)]
    for number, code, tests in rows:
        assert REPOSITORY_PATH.findall(code), number
        named = REPOSITORY_PATH.findall(tests)
        assert named, number
        assert all(name.startswith("tests/") for name in named), number


def test_the_table_of_config_keys_is_that_of_the_code():
    text = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    status = {}
    for keys, what in re.findall(r"^\| (`[^|]+) \| (\w+)", text, re.MULTILINE):
        status.update(dict.fromkeys(re.findall(r"`(\w+)`", keys), what))
    keys = TUNERS["LORA"].keys
    expected = {
        **dict.fromkeys(keys.all_served, "served"),
        **dict.fromkeys(keys.all_harmless, "harmless"),
        **dict.fromkeys(keys.refused, "refused"),
    }
    assert {key: what for key, what in status.items() if key in expected} == expected


def test_the_table_of_types_is_that_of_the_code():
    text = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_0-9]+)` \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert {kind: (needs, how) for kind, needs, how in rows} == {
        kind: (tuner.effect.value, tuner.computed) for kind, tuner in TUNERS.items()
    }
    refused = re.findall(r"^\| ((?:`[A-Z_0-9]+`(?:, )?)+) \| [^|]+ \|$", text, re.MULTILINE)
    named = [kind for row in refused for kind in re.findall(r"`([A-Z_0-9]+)`", row)]
    assert sorted(named) == sorted(UNSERVED)


def test_the_table_of_errors_is_that_of_the_code():
    text = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(Adapter\w+Error)` \|", text, re.MULTILINE))
    assert named == {cls.__name__ for cls in AdapterError.__subclasses__()}


@pytest.mark.parametrize("name", ["data-flow.svg", "images/line.svg"])
def test_pictures_stand_alone(name):
    picture = (ROOT / "docs" / name).read_text(encoding="utf-8")
    outside = re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?(?!#)[\w/]", picture)
    assert not outside


# --- what is shown runs ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny `model` and `adapters` for it, as the documents name them."""
    root = tmp_path_factory.mktemp("docs")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    for name, targets in (
        ("sql", ["down_proj"]),
        ("sql-v2", ["down_proj"]),
        ("tone", ["q_proj", "v_proj"]),
    ):
        lora = LoraConfig(
            r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        base = LlamaForCausalLM.from_pretrained(root / "model")
        get_peft_model(base, lora).save_pretrained(root / "adapters" / name)
    return root


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if blocks(path.read_text(encoding="utf-8"), "python")],
    ids=document_id,
)
def test_python_blocks_run(path, workplace, monkeypatch, capsys):
    """In order, with one namespace a document."""
    monkeypatch.chdir(workplace)
    namespace: dict[str, object] = {"__name__": "document"}
    for number, block in enumerate(blocks(path.read_text(encoding="utf-8"), "python")):
        title = f"{document_id(path)}, block {number}"
        # As it is written: not with what this file imports from __future__.
        exec(compile(block, title, "exec", dont_inherit=True), namespace)
    if "print(" in path.read_text(encoding="utf-8"):
        assert capsys.readouterr().out


def test_every_command_is_shown():
    shown = {arguments[0] for arguments in commands()}
    group: Any = typer.main.get_command(app)
    assert shown == set(group.list_commands(None))


def test_what_inspect_prints_is_shown(monkeypatch):
    """As far as it takes no model."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    (shown,) = [text for text in blocks(COMMAND_LINE, "text") if text.startswith("adapter LORA")]
    done = CliRunner().invoke(app, ["inspect", "examples/adapters/json"])
    assert done.exit_code == 0, done.output
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert shown.splitlines()[: len(printed)] == printed
    assert f"digest {describe_adapter(ROOT / 'examples/adapters/json').digest}" in printed


def test_the_audit_that_is_shown_has_the_adapters_that_are_there():
    (shown,) = [text for text in blocks(COMMAND_LINE, "text") if text.startswith("policy ")]
    row = re.compile(r"^(\w+) +LORA +(\d+) +(\d+) .* ([0-9a-f]{12})$", re.MULTILINE)
    rows = row.findall(shown)
    assert len(rows) == 2
    for name, rank, modules, digest in rows:
        adapter = describe_adapter(ROOT / "examples" / "adapters" / name)
        assert adapter.digest is not None
        assert adapter.digest.startswith(digest)
        assert (adapter.rank, len(adapter.modules)) == (int(rank), int(modules))


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_command_lines_parse(arguments):
    group: Any = typer.main.get_command(app)
    context = click.Context(group, info_name="branchline")
    command = group.get_command(context, arguments[0])
    command.make_context(arguments[0], arguments[1:], parent=context)


@pytest.mark.parametrize("arguments", [c for c in commands() if c[0] != "serve"], ids=" ".join)
def test_command_lines_run(arguments, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    said = {
        "inspect": "linears",
        "quantize": "linears quantised",
        "simulate": "lost to",
        "verify": "pass",
    }
    assert said.get(arguments[0], "fused") in done.stdout


@pytest.mark.parametrize("arguments", [c for c in commands() if c[0] == "serve"], ids=" ".join)
def test_servers_that_are_shown_load_what_they_name(arguments, workplace, monkeypatch):
    """As far as the moment at which they would serve."""
    loaded = []

    def run_server(config, loader, names):
        loaded.append((names, loader().served.adapters.list()))

    def run_fleet(config, load):
        # Its replicas load adapters by the fleet's table.
        load()
        loaded.append(((config.model.name,), config.modules))

    monkeypatch.chdir(workplace)
    monkeypatch.setattr("branchline.serving.http.server.run_server", run_server)
    monkeypatch.setattr("branchline.serving.ray.run.run_fleet", run_fleet)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    ((names, adapters),) = loaded
    assert names == ("model",)
    shown = [word.partition("=")[0] for word in arguments if word.startswith(("sql=", "tone="))]
    assert [adapter.name for adapter in adapters] == shown
