"""`branchline inspect`: what a folder is, and what speaks against it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import HRAConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import branchline as package
from branchline.adapters.branch import LayerBranch
from branchline.adapters.slots import SlotClasses
from branchline.adapters.weights import LayerWeights, LowRank
from branchline.core.errors import ConfigError
from branchline.core.scheme import SCHEMES
from branchline.linear.quantized_linear import QuantizedLinear
from branchline.serving import quantize_checkpoint
from branchline.serving.inspect import inspect_folder

UP = "model.layers.0.mlp.up_proj"
LINEARS_A_LAYER = 7


@pytest.fixture(scope="module")
def mixed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised checkpoint that leaves the second layer's MLP as it is."""
    out = tmp_path_factory.mktemp("mixed") / "model"
    quantize_checkpoint(model_folder, out, scheme="fp8-dynamic", ignore=("model.layers.1.mlp.*",))
    return out


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


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    document = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def quantization(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def part(name: str) -> str:
    return f"{UP}.{name}".replace(".", "__")


def refused(done) -> str:
    """The finding of a run that ends with one."""
    assert done.code == 1
    assert "cannot be loaded" in done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith("refused: ")]
    return line


def error_line(done) -> str:
    assert done.code == 1
    assert not done.out
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    return line


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
    edit_config(damaged, quantization_config={**said, "ignore": [*said["ignore"], "vision"]})
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
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
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
    line = refused(done)
    assert UP in line
    assert said in line
    assert "compressed-tensors, by config.json" in done.out
    with pytest.raises(package.BranchlineError):
        package.load_model(damaged)


def test_codes_that_belong_to_no_linear(branchline, damaged):
    edit_tensors(damaged, model__norm__weight=torch.ones(32).to(torch.float8_e4m3fn))
    assert "model.norm.weight: holds codes" in refused(branchline("inspect", damaged))


def test_a_quantised_linear_that_is_tied(branchline, model_folder, tmp_path):
    out = tmp_path / "model"
    quantize_checkpoint(model_folder, out, scheme="fp8-dynamic", quantize_lm_head=True)
    edit_config(out, tie_word_embeddings=True)
    assert "ties its weight" in refused(branchline("inspect", out))


def test_codes_without_metadata(branchline, damaged):
    edit_config(damaged, quantization_config=None)
    done = branchline("inspect", damaged, "--json")
    assert done.code == 1
    assert "nothing says how it is quantised" in done.json["problem"]
    assert done.json["quantization"] is None
    assert done.json["linears"] == []


def test_a_format_that_is_not_served(branchline, damaged):
    edit_config(damaged, quantization_config={"quant_method": "gptq", "bits": 4})
    done = branchline("inspect", damaged)
    assert "gptq" in refused(done)


def test_metadata_that_is_damaged(branchline, damaged):
    edit_config(damaged, quantization_config={**quantization(damaged), "frobnicate": 3})
    done = branchline("inspect", damaged, "--json")
    assert "frobnicate" in done.json["problem"]
    assert done.json["quantization"] is None
    assert done.json["parameters"] > 0


# --- adapters


def test_an_adapter(branchline, sql):
    done = branchline("inspect", sql, "--json")
    assert done.code == 0, done.err
    report = done.json
    assert (report["schema_version"], report["kind"], report["on"]) == (1, "adapter", None)
    assert report["adapter"]["targets"] == ["down_proj"]
    assert [layer["shape"] for layer in report["adapter"]["layers"]] == [[32, 64]] * 2
    out = branchline("inspect", sql).out
    assert "model.layers.*.mlp.down_proj (x2)" in out
    assert report["adapter"]["digest"] in out


@pytest.mark.parametrize("model", ["model_folder", "mixed"])
def test_an_adapter_on_a_model_costs_what_loading_it_costs(branchline, request, tone, model):
    folder = request.getfixturevalue(model)
    done = branchline("inspect", tone, "--on", folder, "--max-lora-rank", 8, "--json")
    assert done.code == 0, done.err
    fit = done.json["on"]
    served = package.wrap(package.load_model(folder), max_lora_rank=8)
    loaded = served.adapters.load("tone", tone)
    assert fit["digest"] == loaded.digest
    layers = {f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qv"}
    assert set(fit["raw"]) == layers
    assert fit["linears_of_model"] == 2 * LINEARS_A_LAYER + 1
    slots = [
        LayerBranch(n, SlotClasses((8,)), 32, 32, torch.bfloat16, torch.device("cpu"))
        for n in layers
    ]
    for slot in slots:
        slot.write(0, LayerWeights(low_rank=LowRank(torch.ones(4, 32), torch.ones(32, 4), 1.0)))
    assert fit["slot_nbytes"] == sum(slot.nbytes for slot in slots) > 0
    out = branchline("inspect", tone, "--on", folder).out
    assert "fits; a slot of rank 16 takes" in out
    assert "4 of 15 linears raw" in out


def test_an_adapter_that_takes_the_weights_of_the_base_fits(branchline, model_folder, tmp_path):
    config = LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], use_dora=True, task_type="CAUSAL_LM"
    )
    get_peft_model(LlamaForCausalLM.from_pretrained(model_folder), config).save_pretrained(tmp_path)
    done = branchline("inspect", tmp_path, "--on", model_folder, "--json")
    assert done.code == 0, done.err
    fit = done.json["on"]
    assert fit["problem"] is None
    assert fit["digest"] is None
    assert any("DoRA" in note and "base's weights" in note for note in fit["notes"])
    served = package.wrap(package.load_model(model_folder))
    served.adapters.load("tone", tmp_path)
    live = served.adapters.live(["tone"])
    layers = served.registry.layers
    held = {name for name, layer in layers.items() if served.registry.branches(layer, live)}
    assert set(fit["raw"]) == held
    wide = LlamaConfig(vocab_size=48, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    LlamaForCausalLM(wide).save_pretrained(tmp_path / "wide")
    assert "is for 32 inputs" in refused(branchline("inspect", tmp_path, "--on", tmp_path / "wide"))


def test_a_slot_costs_what_all_parts_of_an_adapter_take(branchline, model_folder, tmp_path):
    config = LoraConfig(
        r=4,
        target_modules=["embed_tokens"],
        modules_to_save=["model.norm", "o_proj"],
        task_type="CAUSAL_LM",
    )
    get_peft_model(LlamaForCausalLM.from_pretrained(model_folder), config).save_pretrained(
        tmp_path, save_embedding_layers=False
    )
    done = branchline("inspect", tmp_path, "--on", model_folder, "--json")
    assert done.code == 0, done.err
    served = package.wrap(package.load_model(model_folder))
    served.adapters.load("parts", tmp_path)
    # None of these parts lies in a stack that has room for other slots.
    assert done.json["on"]["slot_nbytes"] == served.adapters.memory().device_bytes > 0


def test_an_adapter_that_does_not_fit(branchline, tone, mixed, tmp_path):
    line = refused(branchline("inspect", tone, "--on", mixed, "--max-lora-rank", 2))
    assert "rank 4 but slots were sized for 2" in line
    wide = LlamaConfig(vocab_size=48, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    LlamaForCausalLM(wide).save_pretrained(tmp_path)
    done = branchline("inspect", tone, "--on", tmp_path)
    assert "is for 32 inputs but the layer has 64" in refused(done)
    assert "does not fit" in done.out


def test_an_adapter_that_is_not_served(branchline, model_folder, tmp_path):
    config = HRAConfig(target_modules=["k_proj"], task_type="CAUSAL_LM")
    get_peft_model(LlamaForCausalLM.from_pretrained(model_folder), config).save_pretrained(tmp_path)
    done = branchline("inspect", tmp_path)
    assert "PEFT type 'HRA' is not served" in refused(done)
    assert "adapter HRA, " in done.out


# --- what cannot be read


def test_folders_that_are_neither_or_both(branchline, model_folder, sql, tmp_path):
    assert "does not exist" in error_line(branchline("inspect", tmp_path / "none"))
    assert "is no folder" in error_line(branchline("inspect", sql / "adapter_config.json"))
    assert "holds neither config.json nor" in error_line(branchline("inspect", tmp_path))
    both = shutil.copytree(sql, tmp_path / "both")
    shutil.copy(model_folder / "config.json", both)
    assert "holds both config.json and" in error_line(branchline("inspect", both))


def test_a_base_that_is_no_model(branchline, sql, tone):
    assert "holds a PEFT adapter" in error_line(branchline("inspect", sql, "--on", tone))


def test_files_of_weights_that_cannot_be_read(branchline, damaged):
    weights = damaged / "model.safetensors"
    weights.write_bytes(b"not a safetensors file")
    assert "cannot be read" in error_line(branchline("inspect", damaged))
    weights.unlink()
    assert "holds neither model.safetensors nor" in error_line(branchline("inspect", damaged))


def test_flags_that_go_with_an_adapter(branchline, model_folder, sql):
    assert "is for an adapter" in error_line(branchline("inspect", model_folder, "--on", sql))
    assert branchline("inspect", sql, "--max-lora-rank", 8).code == 2
    with pytest.raises(ConfigError, match="max_lora_rank"):
        inspect_folder(model_folder, max_lora_rank=8)


def test_no_code_of_a_checkpoint_runs(branchline, tmp_path):
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "c.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "c.py").write_text("raise SystemExit('code of a checkpoint ran')")
    assert "cannot read it" in error_line(branchline("inspect", tmp_path))
