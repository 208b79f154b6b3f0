"""Quantised checkpoints with experts: read as they are, nothing is quantised twice or made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import branchline
from branchline.core.errors import CheckpointError
from branchline.core.scheme import (
    BLOCK_128,
    BLOCK_128_UE8M0,
    PER_CHANNEL,
    WeightScheme,
)
from branchline.linear.experts.quantized import QuantizedExperts
from branchline.linear.quantized_weight import QuantizedWeight
from branchline.serving import quantize_checkpoint
from branchline.serving.inspect import inspect_source
from tests.moe import checkpoints as moe
from tests.moe.models import build, token_ids

IDS = token_ids(2, 9)
LAYER = "model.layers.0.mlp.experts"
UP, DOWN = f"{LAYER}.gate_up_proj", f"{LAYER}.down_proj"


def experts_of(model) -> dict[str, QuantizedExperts]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantizedExperts)}


def float_twin(tmp_path: Path, model):
    """The float model as it is after a load, which keeps its rotary frequencies in float32."""
    model.save_pretrained(tmp_path / "float")
    return branchline.load_model(tmp_path / "float")


def folder_of(tmp_path, kind="qwen3_moe", quantize=None, config=None, layers=1, **settings):
    model = build(kind, num_hidden_layers=layers, **settings)
    written = quantize or moe.fine_grained()
    return model, moe.write(tmp_path / "model", model, written, config or moe.fp8_config())


def logits(model):
    return branchline.wrap(model)(IDS).logits


def assert_same_codes(model, other):
    found, wanted = experts_of(model), experts_of(other)
    assert found.keys() == wanted.keys()
    for name, experts in found.items():
        for projection, scheme in experts.schemes.items():
            assert scheme == wanted[name].schemes[projection]
            pair = [m.quantized_weight(projection) for m in (experts, wanted[name])]
            assert torch.equal(*(weight.scales() for weight in pair))
            assert torch.equal(*(weight.codes().view(torch.uint8) for weight in pair))


# --- what is loaded


@pytest.mark.parametrize("kind", ["minimax_m2", "qwen3_moe", "deepseek_v3", "mixtral"])
def test_fine_grained_checkpoints_are_served_as_the_float_model_quantised_so(kind, tmp_path):
    # The first layer of a DeepSeek-V3 has no experts.
    model, folder = folder_of(tmp_path, kind, layers=2 if kind == "deepseek_v3" else 1)
    loaded = branchline.load_model(folder)
    found = experts_of(loaded)
    assert len(found) == 1
    for experts in found.values():
        assert {str(s) for s in experts.schemes.values()} == {
            "fp8-block128x128 x fp8-dynamic-group128"
        }
        assert all(p.is_meta for p in experts.original.parameters())
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    served = branchline.wrap(loaded)
    twin = branchline.wrap(float_twin(tmp_path, model), quant="fp8-block")
    assert torch.equal(served(IDS).logits, twin(IDS).logits)
    for name, layer in served.registry.layers.items():
        other = twin.registry.layers[name].kernel
        assert torch.equal(layer.kernel.dequantized(), other.dequantized()), name
        assert layer.kernel.contract.key == other.contract.key
    assert any("128x128" in line for line in served.audit().checkpoint.decisions)


def test_codes_lie_in_the_order_of_experts_with_gates_before_ups(tmp_path):
    """More than ten of them: the names in a file are not in that order."""
    _, folder = folder_of(tmp_path, "mixtral", num_local_experts=12)
    stored = load_file(folder / "model.safetensors")
    experts = experts_of(branchline.load_model(folder))[LAYER]
    at = "model.layers.0.block_sparse_moe.experts"
    up, down = (experts.quantized_weight(p) for p in ("gate_up_proj", "down_proj"))
    for number in range(12):
        parts = [stored[f"{at}.{number}.{name}.weight"].view(torch.uint8) for name in ("w1", "w3")]
        assert torch.equal(up.experts[number].codes.view(torch.uint8), torch.cat(parts))
        codes = stored[f"{at}.{number}.w2.weight"]
        assert torch.equal(down.experts[number].codes.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize(
    ("strategy", "inputs", "quantize", "quant"),
    [
        ("channel", "token", moe.per_channel(), "fp8-dynamic"),
        ("channel", None, moe.per_channel(), "fp8-weight-only"),
        ("block", "group", moe.quantized_as(BLOCK_128), "fp8-block"),
    ],
)
def test_compressed_tensors(strategy, inputs, quantize, quant, tmp_path):
    config = moe.ct_config(strategy, inputs)
    model, folder = folder_of(tmp_path, "mixtral", quantize, config)
    loaded = branchline.load_model(folder)
    assert len(experts_of(loaded)) == 1
    assert loaded.branchline_checkpoint.unmatched == ("re:.*mlp.gate$",)
    twin = branchline.wrap(float_twin(tmp_path, model), quant=quant)
    assert torch.equal(logits(loaded), twin(IDS).logits)


def test_unquantised_inputs_equal_eager_transformers_on_the_dequantised_weights(tmp_path):
    settings = {"dtype": torch.float32}
    config = moe.ct_config("channel", None)
    model, folder = folder_of(tmp_path, "qwen3_moe", moe.per_channel(), config, **settings)
    tensors = {}
    for name, tensor in moe.published(model).items():
        weight = tensor
        if moe.is_quantized(name, tensor):
            weight = QuantizedWeight.from_float(tensor, name, PER_CHANNEL).dequantize()
        tensors[name] = weight
    model.save_pretrained(tmp_path / "float")
    moe.save(tmp_path / "float", tensors)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    plain.set_experts_implementation("eager")
    wanted = plain(IDS).logits
    found = logits(branchline.load_model(folder))
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_scales_a_tensor_become_scales_a_channel(tmp_path):
    config = moe.ct_config("tensor", "token")
    _, folder = folder_of(tmp_path, "qwen3_moe", moe.per_tensor(), config)
    loaded = branchline.load_model(folder)
    experts = experts_of(loaded)[LAYER]
    stored = load_file(folder / "model.safetensors")
    up = experts.quantized_weight("gate_up_proj")
    assert up.scheme == PER_CHANNEL
    for number, own in enumerate(up.experts):
        gate, ups = (
            stored[f"{LAYER}.{number}.{name}.weight_scale"].item()
            for name in ("gate_proj", "up_proj")
        )
        assert gate != ups
        assert own.scale.flatten().tolist() == [gate] * 128 + [ups] * 128
    assert "to the bit" in " ".join(loaded.branchline_checkpoint.decisions)


def test_experts_share_the_largest_static_scale(tmp_path):
    numbers = iter(range(1, 10_000))
    quantize = moe.per_tensor(activation_scale=lambda name: torch.tensor(next(numbers) / 64))
    config = moe.fp8_config(activation_scheme="static", weight_block_size=None)
    _, folder = folder_of(tmp_path, "qwen3_moe", quantize, config)
    stored = load_file(folder / "model.safetensors")
    loaded = branchline.load_model(folder)
    contract = experts_of(loaded)[LAYER].contracts["gate_up_proj"]
    given = [
        stored[f"{LAYER}.{number}.{name}.activation_scale"].item()
        for number in range(4)
        for name in ("gate_proj", "up_proj")
    ]
    assert contract.static_scale(UP).number == max(given) != min(given)
    assert "share the largest" in " ".join(loaded.branchline_checkpoint.decisions)


def test_scales_that_are_powers_of_two(tmp_path):
    quantize = moe.quantized_as(BLOCK_128_UE8M0, "weight_scale_inv")
    model, folder = folder_of(tmp_path, quantize=quantize, config=moe.fp8_config(scale_fmt="ue8m0"))
    twin = branchline.wrap(float_twin(tmp_path, model), quant="fp8-block-ue8m0")
    assert torch.equal(logits(branchline.load_model(folder)), twin(IDS).logits)


@pytest.mark.parametrize(("width", "rows"), [(192, 64), (200, 1)])
def test_blocks_do_not_straddle_gates_and_ups(width, rows, tmp_path):
    model, folder = folder_of(tmp_path, moe_intermediate_size=width)
    experts = experts_of(branchline.load_model(folder))[LAYER]
    up = experts.quantized_weight("gate_up_proj")
    assert up.scheme == WeightScheme(rows, 128)
    whole = model.model.layers[0].mlp.experts.gate_up_proj
    for own, weight in zip(up.experts, whole, strict=True):
        parts = [
            QuantizedWeight.from_float(half, "x", BLOCK_128).dequantize()
            for half in weight.chunk(2)
        ]
        assert torch.equal(own.dequantize(), torch.cat(parts))


# --- tensors of all experts


def test_tensors_that_hold_all_experts(tmp_path):
    model, folder = folder_of(tmp_path)
    single = branchline.load_model(folder)
    moe.stack(folder, model)
    assert_same_codes(branchline.load_model(folder), single)


def test_two_grids_of_scales_in_one_tensor(tmp_path):
    model, folder = folder_of(tmp_path, moe_intermediate_size=192)
    single = branchline.load_model(folder)
    moe.stack(folder, model)
    assert_same_codes(branchline.load_model(folder), single)


def test_a_grid_that_can_be_read_in_two_ways_is_refused(tmp_path):
    model, folder = folder_of(tmp_path, moe_intermediate_size=200)
    moe.stack(folder, model)
    with pytest.raises(CheckpointError, match="may begin anew with the ups or not"):
        branchline.load_model(folder)


# --- what stays, and what is refused


@pytest.mark.parametrize("entry", ["mlp.experts", LAYER])
def test_experts_that_stay(entry, tmp_path):
    stays = "experts" if entry == "mlp.experts" else LAYER

    def quantize(name, weight):
        return None if stays in name else moe.fine_grained()(name, weight)

    config = moe.fp8_config(modules_to_not_convert=[entry, "lm_head", "gate"])
    _, folder = folder_of(tmp_path, quantize=quantize, config=config, layers=2)
    loaded = branchline.load_model(folder)
    assert LAYER not in experts_of(loaded)
    assert loaded.get_submodule(LAYER).gate_up_proj.dtype == torch.bfloat16
    assert len(experts_of(loaded)) == (0 if entry == "mlp.experts" else 1)
    assert loaded.branchline_checkpoint.unmatched == ()


def drop(*ends):
    def edit(tensors):
        for name in [name for name in tensors if name.endswith(ends)]:
            del tensors[name]

    return edit


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (drop("0.mlp.experts.2.up_proj.weight_scale_inv"), rf"{LAYER}: are not .*\.2\.up_proj has"),
        (
            drop("0.mlp.experts.2.up_proj.weight_scale_inv", "0.mlp.experts.2.up_proj.weight"),
            rf"{UP}: the checkpoint lacks experts 2 of 4 \(up_proj\)",
        ),
        (
            put(f"{LAYER}.1.down_proj.weight", torch.ones(128, 128, dtype=torch.bfloat16)),
            r"\.1\.down_proj has weight bfloat16",
        ),
        (put(f"{LAYER}.1.down_proj.zero_point", torch.ones(1)), r"\.1\.down_proj has .*zero_point"),
        (put(f"{LAYER}.1.foo.weight", torch.ones(2, 2)), rf"{LAYER}: holds tensors of .*1\.foo"),
        (put(f"{LAYER}.7.up_proj.weight", torch.ones(2, 2)), "has experts 7 of 4"),
    ],
)
def test_damaged_experts_are_named(edit, said, tmp_path):
    _, folder = folder_of(tmp_path)
    moe.change(folder, edit)
    with pytest.raises(CheckpointError, match=said):
        branchline.load_model(folder)
    assert inspect_source(folder).problem is not None


def test_half_quantised_experts_are_listed(tmp_path):
    def quantize(name, weight):
        return None if "down_proj" in name else moe.fine_grained()(name, weight)

    config = moe.fp8_config(modules_to_not_convert=["down_proj", "lm_head"])
    _, folder = folder_of(tmp_path, quantize=quantize, config=config)
    with pytest.raises(CheckpointError, match=r"quantised in part: 4 of 12 .*\.0\.down_proj"):
        branchline.load_model(folder)


def test_experts_of_another_shape(tmp_path):
    _, folder = folder_of(tmp_path)
    moe.edit_config(folder, moe_intermediate_size=256)
    with pytest.raises(CheckpointError, match="the model's takes"):
        branchline.load_model(folder)


def test_layers_that_the_model_has_no_place_for_are_noted(tmp_path):
    """Published DeepSeek-V3 checkpoints hold one more layer, which predicts further tokens."""
    _, folder = folder_of(tmp_path, "deepseek_v3", layers=2)
    beyond = "model.layers.61.mlp.experts.0.gate_proj.weight"
    moe.change(folder, put(beyond, torch.zeros(128, 128).to(torch.float8_e4m3fn)))
    loaded = branchline.load_model(folder)
    assert any(beyond in line for line in loaded.branchline_checkpoint.decisions)


# --- what is said, and written


def test_inspect_counts_linears_of_experts(tmp_path):
    _, folder = folder_of(tmp_path)
    report = inspect_source(folder)
    assert report.problem is None
    (scheme,) = report.quantization.schemes
    assert len(scheme.linears) == 4 + 3 * 4


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-block-ue8m0"])
def test_quantize_writes_experts_as_linears(scheme, tmp_path):
    model = build("mixtral", num_hidden_layers=1)
    twin = float_twin(tmp_path, model)
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "out", scheme=scheme)
    assert len(report.layers) == 4 + 3 * 4
    loaded = branchline.load_model(tmp_path / "out")
    assert loaded.branchline_checkpoint.unmatched == ()
    assert torch.equal(logits(loaded), branchline.wrap(twin, quant=scheme)(IDS).logits)


def test_quantize_calibrates_experts(tmp_path):
    build("mixtral", num_hidden_layers=1).save_pretrained(tmp_path / "float")
    prompts = [token_ids(4, 12, seed=9)]
    settings = {"scheme": "fp8-static", "calibration": prompts}
    quantize_checkpoint(tmp_path / "float", tmp_path / "out", **settings)
    loaded = branchline.load_model(tmp_path / "out")
    for experts in experts_of(loaded).values():
        scales = {name: c.static_scale(name).number for name, c in experts.contracts.items()}
        assert len(set(scales.values())) == 2


def test_quantize_names_experts_that_stay(tmp_path):
    build("gpt_oss", num_hidden_layers=1).save_pretrained(tmp_path / "float")
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "out", scheme="fp8-dynamic")
    left = {entry.name: entry.reason for entry in report.unquantized}
    assert "lie in one tensor" in left[UP]
    assert "lie in one tensor" in left[DOWN]
    assert not experts_of(branchline.load_model(tmp_path / "out"))


def test_quantize_leaves_experts_whole(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path / "float")
    settings = {"scheme": "fp8-dynamic", "ignore": ("*.0.mlp.experts.down_proj",)}
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "out", **settings)
    left = {entry.name: entry.reason for entry in report.unquantized}
    assert "other projection" in left[UP]
    assert set(experts_of(branchline.load_model(tmp_path / "out"))) == {
        "model.layers.1.mlp.experts"
    }
