"""Whether the base that an adapter names is the one that is served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from branchline.adapters.identity import (
    BaseIdentity,
    NamedBase,
    compare_bases,
    identifying_sizes,
)
from branchline.adapters.read import read_adapter
from branchline.core.errors import AdapterMismatchError
from tests.helpers import edit_adapter

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"
CACHED = f"/home/u/.cache/huggingface/hub/models--acme--Tiny-8B/snapshots/{COMMIT}"
SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def compare(trained: str, served: str, **known: Any) -> tuple[list[str], list[str]]:
    findings, notes = compare_bases(NamedBase(trained), BaseIdentity(served, **known))
    assert all(finding.error is AdapterMismatchError for finding in findings)
    return [finding.text for finding in findings], notes


@pytest.mark.parametrize(
    "served",
    [
        "acme/Tiny-8B",
        "other/tiny-8b",
        "acme/Tiny-8B-FP8",
        "acme/Tiny-8B-FP8-dynamic",
        "acme/Tiny-8B-fp8-block",
        "acme/Tiny-8B-quantized.w8a8",
        "acme/Tiny-8B-AWQ-INT4",
        "acme/Tiny-8B-GPTQ-Int8",
        "acme/Tiny-8B-bnb-4bit",
        "acme/Tiny-8B_bf16",
        "acme/Tiny-8B-hf",
        "acme/Meta-Tiny-8B",
        "acme/Tiny-8B-NVFP4",
        CACHED,
    ],
)
def test_other_forms_of_the_same_model_are_no_difference(served):
    assert compare("acme/Tiny-8B", served) == ([], [])
    assert compare(served, "acme/Tiny-8B") == ([], [])


@pytest.mark.parametrize(
    ("trained", "served"),
    [
        ("acme/Tiny-8B", "acme/Tiny-8B-Instruct"),
        ("acme/Tiny-8B-Instruct", "acme/Tiny-8B-Instruct-v2"),
        ("acme/Tiny-8B", "acme/Tiny-7B-FP8"),
        ("acme/Tiny-8B-Chat", CACHED),
        (CACHED, "acme/Tiny-8B-Chat"),
        # No form is left of a name that is nothing else.
        ("acme/fp8", "acme/int8"),
    ],
)
def test_two_hub_ids_that_differ_are_a_finding_that_names_both(trained, served):
    ((text,), notes) = compare(trained, served)
    assert repr(trained) in text
    assert repr(served) in text
    assert notes == []
    (finding,), _ = compare_bases(NamedBase(trained), BaseIdentity(served))
    assert "wrap with allow_base_mismatch=True (command line: --allow-base-mismatch)" in (
        finding.remedy
    )


def test_what_is_allowed_is_noted():
    findings, notes = compare("acme/Tiny", "acme/Large", allow_mismatch=True)
    assert findings == []
    (note,) = notes
    assert "'acme/Tiny'" in note
    assert "'acme/Large'" in note
    assert "allowed" in note


@pytest.mark.parametrize(
    ("trained", "served"),
    [
        ("acme/Tiny", "/srv/models/large"),
        ("/srv/models/tiny", "acme/Large"),
        ("./tiny", "acme/Large"),
        ("tiny", "acme/Large"),
        ("a/b/tiny", "acme/Large"),
    ],
)
def test_a_folder_s_name_proves_nothing(trained, served):
    findings, (note,) = compare(trained, served)
    assert findings == []
    assert repr(trained) in note
    assert repr(served) in note


def test_a_folder_of_the_form_of_a_hub_id_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare("acme/Tiny", "acme/Large")[0]
    (tmp_path / "acme" / "Large").mkdir(parents=True)
    findings, notes = compare("acme/Tiny", "acme/Large")
    assert findings == []
    assert len(notes) == 1


@pytest.mark.parametrize("trained", ["", "acme/Tiny"])
def test_what_is_not_known_is_not_compared(trained):
    assert compare(trained, "") == ([], [])
    assert compare("", "acme/Tiny") == ([], [])


# --- revisions


def revisions(trained: str, served: str) -> list[str]:
    findings, notes = compare_bases(
        NamedBase("acme/Tiny", trained), BaseIdentity("acme/Tiny", served)
    )
    assert findings == []
    return notes


def test_another_commit_is_noted():
    (note,) = revisions(COMMIT, OTHER_COMMIT)
    assert COMMIT in note
    assert OTHER_COMMIT in note
    (note,) = compare_bases(NamedBase(CACHED), BaseIdentity("acme/Tiny-8B", OTHER_COMMIT))[1]
    assert COMMIT in note
    assert revisions(COMMIT, COMMIT) == revisions(COMMIT[:8], COMMIT) == []


@pytest.mark.parametrize("trained", ["", "main", "v1.0"])
def test_a_branch_may_be_any_commit(trained):
    assert revisions(trained, COMMIT) == revisions(COMMIT, "") == []


# --- folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value", "meaning"),
    [
        ("model_type", "qwen2", "model type"),
        ("hidden_size", 96, "hidden size"),
        ("num_hidden_layers", 3, "number of layers"),
        ("num_attention_heads", 8, "number of heads"),
        ("vocab_size", 300, "size of the vocabulary"),
    ],
)
def test_a_folder_s_config_is_compared(folder, key, value, meaning):
    assert compare(str(folder), str(folder), sizes=SIZES) == ([], [])
    (text,), _ = compare(str(folder), "/srv/served", sizes={**SIZES, key: value})
    assert meaning in text
    assert key in text
    assert repr(SIZES[key]) in text
    assert repr(value) in text


def test_a_key_that_one_side_lacks_is_not_compared(folder):
    findings, _ = compare(str(folder), "/srv/served", sizes={"n_embd": 64})
    assert findings == []


def test_of_several_modalities_the_text_counts(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "both", "text_config": SIZES}))
    assert identifying_sizes({"text_config": SIZES}) == SIZES
    assert compare(str(folder), str(folder), sizes=SIZES) == ([], [])


def test_where_roots_restrict_no_folder_is_looked_at(folder):
    other = {**SIZES, "vocab_size": 300}
    assert compare(str(folder), str(folder), sizes=other)[0]
    assert compare(str(folder), str(folder), sizes=other, reads_folders=False) == ([], [])


@pytest.mark.parametrize("content", ["{", "[]", '{"vocab_size": 1, "vocab_size": 2}'])
def test_a_config_that_cannot_be_read_is_noted(folder, content):
    (folder / "config.json").write_text(content)
    findings, (note,) = compare(str(folder), str(folder), sizes=SIZES)
    assert findings == []
    assert "is not compared" in note


def test_a_path_that_no_system_has_is_no_folder():
    assert compare("a\0b/c", "acme/Tiny", sizes=SIZES)[0] == []
    assert compare("x" * 5_000, "acme/Tiny", sizes=SIZES)[0] == []


# --- reading


def test_reading_refuses_another_base_unless_it_is_allowed(plain, base):
    edit_adapter(plain, base_model_name_or_path="acme/Tiny")
    facts = replace(base, identity=BaseIdentity("acme/Large"))
    with pytest.raises(AdapterMismatchError, match=r"'acme/Tiny'.*'acme/Large'.*--allow-base"):
        read_adapter(plain, facts, max_rank=16)
    allowed = facts.with_base_rules(allow_mismatch=True, reads_folders=True)
    weights = read_adapter(plain, allowed, max_rank=16)
    assert any("allow_base_mismatch" in note for note in weights.notes)
    assert weights.digest == read_adapter(plain, base, max_rank=16).digest


def test_the_revision_of_the_config_is_compared(plain, base):
    edit_adapter(plain, base_model_name_or_path="acme/Tiny", revision=COMMIT)
    facts = replace(base, identity=BaseIdentity("acme/Tiny", OTHER_COMMIT))
    assert any(COMMIT in note for note in read_adapter(plain, facts, max_rank=16).notes)


@pytest.mark.parametrize(
    "stored",
    [
        "unsloth/Llama-3.2-1B-unsloth-bnb-4bit",
        "RedHatAI/Meta-Llama-3.2-1B-quantized.w4a16",
        "neuralmagic/Llama-3.2-1B-FP8-KV",
        "x/Llama-3.2-1B-FP8_dynamic",
        "x/llama-3.2-1b-fp16",
        "nvidia/Llama-3.2-1B-FP4",
    ],
)
def test_other_forms_of_one_model(stored):
    plain = "meta-llama/Llama-3.2-1B"
    for trained, served in ((stored, plain), (plain, stored)):
        assert compare_bases(NamedBase(trained), BaseIdentity(served)) == ([], [])
    findings, _ = compare_bases(NamedBase(stored), BaseIdentity("meta-llama/Llama-3.2-3B"))
    assert findings


@pytest.mark.parametrize("path", ["models/llama3", "outputs/run-7", "checkpoints/x"])
def test_a_relative_folder_that_is_not_here_is_a_note(path):
    findings, notes = compare_bases(NamedBase(path), BaseIdentity("meta-llama/Llama-3.2-1B"))
    assert not findings
    assert notes
