"""What an adapter folder tells without its base model."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from branchline.adapters.describe import describe_adapter
from branchline.adapters.read import read_adapter
from branchline.core.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
)
from tests.adapters.test_read import CASES, write_case
from tests.helpers import edit_adapter

LOADS = [name for name, case in CASES.items() if case["expect"]["result"].startswith("loads")]
# What it computes hangs on the base's weights.
NEEDS_WEIGHTS = {"dora-flag"}
# What is wrong with these shows on a model only.
NEEDS_A_BASE = {"rank-too-high", "nothing-matches", "wrong-shape"}


@pytest.mark.parametrize("name", sorted(set(LOADS) - NEEDS_WEIGHTS))
def test_what_loads_has_no_problem_and_the_digest_it_gets_when_loaded(name, tmp_path, base):
    folder = write_case(tmp_path / name, name)
    summary = describe_adapter(folder)
    loaded = read_adapter(folder, base, max_rank=64)
    assert summary.problem is None
    mapped = any("names mapped" in note for note in loaded.notes)
    assert mapped == (name == "language-model-prefix")
    assert (summary.digest == loaded.digest) is not mapped
    assert [(x.rank, x.scaling) for x in summary.modules if x.rank is not None] == [
        (x.rank, x.low_rank.scaling) for x in loaded.layers.values() if x.low_rank is not None
    ]
    assert len(summary.modules) == len(loaded.layers)
    raw = sum(layer.reads_raw for layer in loaded.layers.values())
    assert sum(bool(x.reads_raw) for x in summary.modules) == raw
    assert summary.parameters == loaded.parameters
    assert summary.nbytes == (folder / "adapter_model.safetensors").stat().st_size


@pytest.mark.parametrize("name", sorted(set(CASES) - set(LOADS) - NEEDS_A_BASE))
def test_what_no_model_can_load_is_told_with_what_is_there(name, tmp_path):
    case = CASES[name]
    summary = describe_adapter(write_case(tmp_path / name, name))
    # The task is compared with a model's; without one, the trained head beside it is named.
    words = ["head"] if name == "seq-cls-on-causal-lm" else case["expect"]["error_names"]
    found = [word in (summary.problem or "") for word in words]
    assert any(found) if case["expect"].get("any") else all(found), summary.problem
    assert summary.digest is None
    assert all(module.rank is module.scaling is None for module in summary.modules)
    stored = sum(math.prod(shape) for _, shape, _ in case["tensors"])
    assert summary.parameters == stored
    assert summary.peft_type == case["config"].get("peft_type")


@pytest.mark.parametrize("name", sorted(NEEDS_A_BASE))
def test_what_only_a_base_can_refuse_is_no_problem_yet(name, tmp_path):
    assert describe_adapter(write_case(tmp_path / name, name)).problem is None


def test_what_takes_the_weights_of_a_base_is_no_problem_and_has_no_digest_yet(tmp_path):
    summary = describe_adapter(write_case(tmp_path / "dora", "dora-flag"))
    assert summary.problem is None
    assert summary.digest is None
    assert len(summary.modules) == 4
    assert {x.parts for x in summary.modules} == {("lora_A", "lora_B", "lora_magnitude_vector")}
    assert all(x.rank and x.scaling and x.reads_raw for x in summary.modules)
    assert any("DoRA" in note for note in summary.notes)


def test_what_is_saved_beside_the_type_is_checked_on_a_model_only(plain):
    file = plain / "adapter_model.safetensors"
    copies = {
        "base_model.model.lm_head.weight": torch.ones(256, 64),
        "base_model.model.model.embed_tokens.base_layer.weight": torch.ones(256, 64),
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(
            3, 64
        ),
    }
    save_file(load_file(file) | copies, file)
    edit_adapter(plain, modules_to_save=["lm_head"])
    summary = describe_adapter(plain)
    assert (summary.problem, summary.digest) == (None, None)
    told = {x.name.removeprefix("model."): (x.parts, x.rank, x.scaling) for x in summary.modules}
    assert told["lm_head"] == (("weight",), None, None)
    assert set(told["embed_tokens"][0]) == {"copy of the base's weight", "3 tokens"}
    assert told["layers.0.self_attn.q_proj"] == (("lora_A", "lora_B"), 8, 2.0)
    assert all(x.reads_raw is None for x in summary.modules)
    assert any("on a model only" in note for note in summary.notes)
    edit_adapter(plain, frobnicate=3)
    assert "frobnicate" in (describe_adapter(plain).problem or "")


def test_a_plain_adapter(plain):
    edit_adapter(plain, base_model_name_or_path="acme/tiny")
    summary = describe_adapter(plain)
    assert (summary.peft_type, summary.base_model, summary.task) == (
        "LORA",
        "acme/tiny",
        "CAUSAL_LM",
    )
    assert (summary.rank, summary.alpha, summary.targets) == (8, 16, ("q_proj", "v_proj"))
    modules = summary.modules
    assert {(x.name.rpartition(".")[2], x.rank, x.scaling, x.shape) for x in modules} == {
        ("q_proj", 8, 2.0, (64, 64)),
        ("v_proj", 8, 2.0, (32, 64)),
    }
    assert {(x.kind, x.parts, x.reads_raw) for x in modules} == {("linear", ("low-rank",), True)}
    assert summary.dtypes == ("F32",)


def test_default_targets_go_by_the_base_and_do_not_speak_against_it(plain, base):
    edit_adapter(plain, target_modules=None)
    summary = describe_adapter(plain)
    assert summary.targets == ()
    assert summary.problem is None
    assert summary.digest == read_adapter(plain, base, max_rank=8).digest


@pytest.mark.parametrize("name", ["r", "lora_alpha", "task_type", "target_modules"])
def test_a_value_of_a_wrong_type_is_the_problem(plain, name):
    edit_adapter(plain, **{name: {"a": [1]}})
    assert name in (describe_adapter(plain).problem or "")


def test_a_half_that_is_no_matrix_is_the_problem(plain):
    file = plain / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: torch.tensor(1.0)}, file)
    assert "0 dimensions" in (describe_adapter(plain).problem or "")


def test_files_that_are_not_there(plain, tmp_path):
    with pytest.raises(AdapterNotFoundError):
        describe_adapter(tmp_path / "none")
    (plain / "adapter_model.safetensors").rename(plain / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match="no archive as torch writes it"):
        describe_adapter(plain)
    (plain / "adapter_config.json").write_text("[")
    with pytest.raises(AdapterFormatError, match="no JSON"):
        describe_adapter(plain)
