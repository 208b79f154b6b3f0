"""`branchline inspect`: what a folder is, and what speaks against it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import branchline as package
from branchline.core.scheme import SCHEMES
from branchline.linear.quantized_linear import QuantizedLinear
from branchline.serving import quantize_checkpoint
from tests.helpers import edit_json

UP = "model.layers.0.mlp.up_proj"
LINEARS_A_LAYER = 7


@pytest.fixture
def damaged(mixed: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(mixed, tmp_path / "model"))


def edit_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors, or remove those that are None; names with two underscores for a dot."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    save_file(stored, file, {"format": "pt"})


def quantization(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def part(name: str) -> str:
    return f"{UP}.{name}".replace(".", "__")


# --- models


def test_a_quantised_model_is_told_as_it_loads(branchline, mixed):
    done = branchline("inspect", mixed, "--json")
    assert done.code == 0, done.err
    report = done.json
    assert (report["schema_version"], report["kind"]) == (1, "model")
    assert (report["architecture"], report["dtype"]) == ("LlamaForCausalLM", "bfloat16")
    assert report["nbytes"] == (mixed / "model.safetensors").stat().st_size
    said = report["quantization"]
    model = package.load_model(mixed)
    loaded = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    (scheme,) = said["schemes"]
    assert scheme["scheme"] == str(SCHEMES["fp8-dynamic"])
    assert scheme["linears"] == list(loaded)
    weights = [module.quantized_weight() for module in loaded.values()]
    assert scheme["nbytes"] == sum(w.codes.nbytes + w.scale.nbytes for w in weights)
    assert set(said["unquantized"]) == {
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
        "lm_head",
    }
    assert said["method"] == "compressed-tensors"
    assert said["source"] == "config.json: quantization_config"
    assert said["decisions"] == list(model.branchline_checkpoint.decisions)
    assert report["linears"] == []
    assert report["problem"] is None


def test_for_a_person(branchline, mixed):
    out = branchline("inspect", mixed).out
    assert "model LlamaForCausalLM, bfloat16, " in out
    assert "compressed-tensors, by config.json: quantization_config: " in out
    assert str(SCHEMES["fp8-dynamic"]) in out
    assert "model.layers.1.mlp.up_proj" in out
    assert "refused" not in out


@pytest.mark.parametrize("tied", [False, True])
def test_an_unquantised_model_and_what_could_be_quantised(branchline, tmp_path, tied):
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(torch.float16)
    model.save_pretrained(tmp_path)
    report = branchline("inspect", tmp_path, "--json").json
    assert report["quantization"] is None
    assert report["dtype"] == "float16"
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    shapes = {linear["name"]: tuple(linear["shape"]) for linear in report["linears"]}
    assert shapes == {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    left = {linear["name"]: linear["left"] for linear in report["linears"] if linear["left"]}
    assert left == {"lm_head": "it is the output head"}
    out = branchline("inspect", tmp_path).out
    assert "model.layers.*.mlp.up_proj (x3)" in out
    assert "64 x 32" in out


def test_an_entry_that_names_no_linear_is_told(branchline, damaged):
    said = quantization(damaged)
    edit_json(
        damaged / "config.json",
        {"quantization_config": {**said, "ignore": [*said["ignore"], "vision"]}},
    )
    done = branchline("inspect", damaged)
    assert done.code == 0
    assert "ignored, but names no linear:\n  vision\n" in done.out


def test_scales_of_the_kv_cache_are_told(branchline, damaged):
    edit_tensors(damaged, model__layers__0__self_attn__k_proj__k_scale=torch.ones(1))
    done = branchline("inspect", damaged)
    assert done.code == 0, done.out
    assert "1 tensors are scales of the KV cache and not used" in done.out


def test_metadata_over_float_weights_is_an_unquantised_model(branchline, model_folder, tmp_path):
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    edit_json(folder / "config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    report = branchline("inspect", folder, "--json").json
    assert report["problem"] is None
    assert report["quantization"]["schemes"] == []
    assert "every weight is float" in " ".join(report["quantization"]["decisions"])
    assert len(report["linears"]) == 2 * LINEARS_A_LAYER + 1


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("weight_scale", None, "has no weight scale"),
        ("weight_zero_point", torch.zeros(1), "weight_zero_point, which such a layer has not"),
        ("input_scale", torch.ones(1), "input_scale, which such a layer has not"),
        ("weight", torch.zeros(64, 32), "but its weight is torch.float32"),
        ("weight", torch.zeros(32, 64).to(torch.float8_e4m3fn), "its weight has shape (32, 64)"),
        ("weight_scale", torch.ones(7, 1), "its weight scale has shape (7, 1)"),
    ],
)
def test_a_contradiction_is_the_finding_and_loading_refuses_it_too(
    branchline, damaged, name, tensor, said
):
    edit_tensors(damaged, **{part(name): tensor})
    done = branchline("inspect", damaged)
    line = done.refusal
    assert UP in line
    assert said in line
    assert "compressed-tensors, by config.json" in done.out
    with pytest.raises(package.BranchlineError):
        package.load_model(damaged)


def test_codes_that_belong_to_no_linear(branchline, damaged):
    edit_tensors(damaged, model__norm__weight=torch.ones(32).to(torch.float8_e4m3fn))
    assert "model.norm.weight: holds codes" in branchline("inspect", damaged).refusal


def test_a_quantised_linear_that_is_tied(branchline, model_folder, tmp_path):
    out = tmp_path / "model"
    quantize_checkpoint(model_folder, out, scheme="fp8-dynamic", quantize_lm_head=True)
    edit_json(out / "config.json", {"tie_word_embeddings": True})
    assert "ties its weight" in branchline("inspect", out).refusal


def test_codes_without_metadata(branchline, damaged):
    edit_json(damaged / "config.json", {"quantization_config": None})
    done = branchline("inspect", damaged, "--json")
    assert done.code == 1
    assert "nothing says how it is quantised" in done.json["problem"]
    assert done.json["quantization"] is None
    assert done.json["linears"] == []


def test_a_format_that_is_not_served(branchline, damaged):
    edit_json(damaged / "config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    done = branchline("inspect", damaged)
    assert "gptq" in done.refusal


def test_metadata_that_is_damaged(branchline, damaged):
    edit_json(
        damaged / "config.json", {"quantization_config": {**quantization(damaged), "frobnicate": 3}}
    )
    done = branchline("inspect", damaged, "--json")
    assert "frobnicate" in done.json["problem"]
    assert done.json["quantization"] is None
    assert done.json["parameters"] > 0


# --- what cannot be read


def test_folders_that_are_neither_or_both(branchline, model_folder, sql, tmp_path):
    assert "does not exist" in branchline("inspect", tmp_path / "none").error
    file = sql / "adapter_config.json"
    assert "is neither a folder nor a zip" in branchline("inspect", file).error
    assert "holds neither config.json nor" in branchline("inspect", tmp_path).error
    both = shutil.copytree(sql, tmp_path / "both")
    shutil.copy(model_folder / "config.json", both)
    assert "holds both config.json and" in branchline("inspect", both).error


def test_files_of_weights_that_cannot_be_read(branchline, damaged):
    weights = damaged / "model.safetensors"
    weights.write_bytes(b"not a safetensors file")
    assert "cannot be read" in branchline("inspect", damaged).error
    weights.unlink()
    assert "holds neither model.safetensors nor" in branchline("inspect", damaged).error


def test_no_code_of_a_checkpoint_runs(branchline, tmp_path):
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "c.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "c.py").write_text("raise SystemExit('code of a checkpoint ran')")
    assert "cannot read it" in branchline("inspect", tmp_path).error
