"""`quantize_checkpoint`: the bytes it writes, who can read them, and its report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import branchline
from branchline.core.errors import ConfigError
from branchline.core.scheme import SCHEMES
from branchline.linear.quantized_linear import QuantizedLinear
from branchline.linear.quantized_weight import QuantizedWeight, code_values
from branchline.linear.quantizers import quantize_input
from branchline.serving.load import load_model
from branchline.serving.quantize_report import QuantizationReport
from tests.checkpoints import CALIBRATED, PROMPTS, WideModels, build_wide, linears_of, quantize
from tests.helpers import same_bytes
from tests.models import CONFIGS, token_ids

FAMILIES = ("gemma3", "llama", "nemotron", "phi3", "qwen3")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> WideModels:
    return WideModels(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def llama(sources) -> tuple[nn.Module, Path]:
    return sources("llama")


def assert_same_weight(read: QuantizedWeight, made: QuantizedWeight) -> None:
    assert read.scheme == made.scheme
    assert same_bytes(read.codes, made.codes)
    assert same_bytes(read.scale, made.scale)
    assert (read.global_scale is None) == (made.global_scale is None)
    if made.global_scale is not None:
        assert same_bytes(read.global_scale, made.global_scale)


# --- what is written is what the wrap would make


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_back_is_what_quantising_the_weight_gives(sources, tmp_path, family, scheme):
    model, source = sources(family)
    report = quantize(source, tmp_path / "out", scheme)
    loaded = load_model(tmp_path / "out")
    assert type(loaded) is type(model)
    assert len(report.layers) == len(linears_of(model)) - 1
    for name, linear in linears_of(model).items():
        read = loaded.get_submodule(name)
        if name == "lm_head":
            assert type(read) is nn.Linear
            continue
        assert isinstance(read, QuantizedLinear)
        wanted = SCHEMES[scheme]
        made = QuantizedWeight.from_float(linear.weight, name, wanted.weight)
        assert_same_weight(read.quantized_weight(), made)
        assert read.scheme == wanted
        assert read.dtype == torch.bfloat16
        assert (read.bias is None) == (linear.bias is None)
        if linear.bias is not None:
            assert torch.equal(read.bias, linear.bias)
    quantized = {f"{layer.name}.weight" for layer in report.layers}
    parameters = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in quantized:
            assert torch.equal(parameters[name], parameter)


@pytest.mark.parametrize("scheme", CALIBRATED)
def test_input_scales_are_those_that_the_wrap_calibrates(llama, tmp_path, scheme):
    _, source = llama
    quantize(source, tmp_path / "out", scheme)
    served = branchline.wrap(load_model(source), quant=scheme, calibration=PROMPTS)
    for name, module in load_model(tmp_path / "out").named_modules():
        if isinstance(module, QuantizedLinear):
            given, wanted = module.contract, served.registry.layers[name].kernel.contract
            assert given.same_input(wanted)
            assert (given.scale is None) == (scheme == "nvfp4")
            assert (given.global_scale is None) == (scheme == "fp8-static")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_served_from_its_checkpoint_or_quantised_at_the_wrap_is_the_same(llama, tmp_path, scheme):
    _, source = llama
    quantize(source, tmp_path / "out", scheme)
    calibration = PROMPTS if scheme in CALIBRATED else None
    served = branchline.wrap(load_model(source), quant=scheme, calibration=calibration)
    loaded = branchline.wrap(load_model(tmp_path / "out"))
    ids = token_ids(2, 7, seed=3)
    same = torch.equal(loaded(input_ids=ids).logits, served(input_ids=ids).logits)
    assert same


def test_a_weight_is_rounded_to_the_models_dtype_first(tmp_path):
    """Loading would round it, so a checkpoint of float32 weights in a bfloat16 model must too."""
    model = build_wide("llama")
    model.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for name, tensor in tensors.items():
        noise = torch.rand(tensor.shape, generator=generator)
        tensors[name] = tensor.float() * (1 + noise * 2**-10)
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    quantize(tmp_path / "source", tmp_path / "out", "fp8-dynamic")
    loaded, plain = load_model(tmp_path / "out"), load_model(tmp_path / "source")
    for name, module in loaded.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = plain.get_submodule(name).weight
            assert weight.dtype == torch.bfloat16
            made = QuantizedWeight.from_float(weight, name)
            assert_same_weight(module.quantized_weight(), made)


# --- other readers


def fake_quantized(x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
    """The values that the codes of `x` stand for."""
    if layer.contract.key is None:
        return x
    made = quantize_input(x, layer.contract, layer.name)
    values = code_values(made.codes.reshape(-1, made.codes.shape[-1])).reshape(x.shape)
    scale = made.scale.float()
    if layer.contract.key.granularity.size:
        scale = scale.repeat_interleave(layer.contract.key.granularity.size, -1)
    if made.global_scale is not None:
        scale = scale * made.global_scale
    return (values * scale).to(x.dtype)


class Dequantized(nn.Linear):
    """A float product with what the codes of weight and input stand for."""

    def __init__(self, layer: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, dtype=dtype)
        self.layer = [layer]
        self.weight.copy_(layer.quantized_weight().dequantize())
        if layer.bias is not None:
            self.bias.copy_(layer.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(fake_quantized(input, self.layer[0]))


def dequantized(folder: Path, dtype: torch.dtype) -> nn.Module:
    model = load_model(folder, dtype=dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            model.set_submodule(name, Dequantized(module, dtype))
    return model


# compressed-tensors dequantises MX and NVFP4 weights to bfloat16 whatever the model's dtype is.
_DTYPES = {"mxfp8": torch.bfloat16, "nvfp4": torch.bfloat16}
_LAYER_TOLERANCE = {"mxfp8": 2e-2, "nvfp4": 5e-2}


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "fp8-block-ue8m0"])
def test_compressed_tensors_in_transformers_reads_the_same(llama, tmp_path, scheme):
    _, source = llama
    quantize(source, tmp_path / "out", scheme)
    dtype = _DTYPES.get(scheme, torch.float32)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=dtype, output_loading_info=True
    )
    # A zero point that the format does not store is made up of zeros.
    assert {name.rpartition(".")[2] for name in report["missing_keys"]} <= {"weight_zero_point"}
    assert not report["unexpected_keys"]
    ours = dequantized(tmp_path / "out", dtype)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(name: str):
        return lambda module, args, output: seen.update({name: (args[0], output)})

    for name, module in ours.named_modules():
        if isinstance(module, Dequantized):
            theirs.get_submodule(name).register_forward_hook(keep(name))
    ids = token_ids(2, 7, seed=3)
    given, wanted = theirs(input_ids=ids).logits, ours(input_ids=ids).logits
    # A tie that is rounded the other way early on moves everything behind it by a step of the
    # codes' grid, and NVFP4's steps are as large as the activations: there only layers compare.
    if scheme != "nvfp4":
        assert distance(given, wanted) < 0.1
    for name, (x, output) in seen.items():
        layer = ours.get_submodule(name)
        read = theirs.get_submodule(name).weight
        if dtype == torch.float32:
            assert torch.equal(read, layer.weight), name
        else:
            # bfloat16 products of scales in another order: one rounding or two.
            torch.testing.assert_close(read, layer.weight, rtol=2**-6, atol=0.0)
        # They divide by a scale where the definition multiplies with its reciprocal.
        assert distance(output, layer(x)) < _LAYER_TOLERANCE.get(scheme, 5e-3), name
    assert len(seen) == 14


def distance(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((given.float() - wanted.float()).norm() / wanted.float().norm()).item()


def test_transformers_fine_grained_fp8_reads_the_same(llama, tmp_path):
    """On a CPU it dequantises the weights, and leaves inputs as they are."""
    _, source = llama
    quantize(source, tmp_path / "out", "fp8-block-ue8m0")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = dequantized(tmp_path / "out", torch.float32)
    for name, module in ours.named_modules():
        if isinstance(module, Dequantized):
            assert torch.equal(theirs.get_submodule(name).weight, module.weight), name


# --- what stays as it is


def test_what_stays_is_named_with_its_reason(llama, tmp_path):
    _, source = llama
    report = quantize(source, tmp_path / "out", "fp8-dynamic", ignore=("*.k_proj", "*.0.mlp.*"))
    reasons = {left.name: left.reason for left in report.unquantized}
    assert reasons["lm_head"] == "it is the output head"
    assert reasons["model.layers.1.self_attn.k_proj"] == "ignored by '*.k_proj'"
    assert reasons["model.layers.0.mlp.up_proj"] == "ignored by '*.0.mlp.*'"
    loaded = load_model(tmp_path / "out")
    plain = {n for n, m in loaded.named_modules() if isinstance(m, nn.Linear)}
    assert plain == set(reasons)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(config["quantization_config"]["ignore"]) == plain


def test_the_head_is_quantised_where_asked_for(llama, tmp_path):
    model, source = llama
    quantize(source, tmp_path / "out", "fp8-dynamic", quantize_lm_head=True)
    head = load_model(tmp_path / "out").lm_head
    assert isinstance(head, QuantizedLinear)
    made = QuantizedWeight.from_float(model.lm_head.weight, "lm_head")
    assert_same_weight(head.quantized_weight(), made)


def test_a_tied_head_cannot_be_quantised(sources, tmp_path):
    _, source = sources("gemma3")
    with pytest.raises(ConfigError, match=r"lm_head: its weight is model\.embed_tokens's too"):
        quantize(source, tmp_path / "out", "fp8-dynamic", quantize_lm_head=True)
    report = quantize(source, tmp_path / "out", "fp8-dynamic")
    assert [left.name for left in report.unquantized] == ["lm_head"]
    loaded = load_model(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_conv1d_is_left_and_a_model_of_them_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).save_pretrained(tmp_path / "source")
    with pytest.raises(ConfigError, match="leaves no linear to quantise: it is a Conv1D"):
        quantize(tmp_path / "source", tmp_path / "out", "fp8-dynamic")


def test_a_weight_that_the_model_reads_itself_stays(llama, tmp_path, monkeypatch):
    """Seen where the model is run, which is to calibrate."""
    _, source = llama

    def forward(self, x):
        gate = torch.nn.functional.linear(x, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    report = quantize(source, tmp_path / "out", "nvfp4")
    reasons = {left.name: left.reason for left in report.unquantized}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.gate_proj"
        assert reasons[name] == "the model reads its weight itself"
        assert type(load_model(tmp_path / "out").get_submodule(name)) is nn.Linear


# --- the report


def test_the_report_measures_every_layer(llama, tmp_path):
    model, source = llama
    report = quantize(source, tmp_path / "out", "fp8-static")
    kept = (tmp_path / "out" / "quantization_report.json").read_text()
    assert QuantizationReport.model_validate_json(kept) == report
    for layer in report.layers:
        weight = model.get_submodule(layer.name).weight
        made = QuantizedWeight.from_float(weight, layer.name).dequantize().double()
        error = (made - weight.double()).square().sum()
        wanted = 10 * torch.log10(weight.double().square().sum() / error)
        assert layer.sqnr_db == pytest.approx(wanted.item(), abs=1e-6)
        assert layer.saturated == 0.0
    worst = report.worst(2)
    assert [w.sqnr_db for w in worst] == sorted(r.sqnr_db for r in report.layers)[:2]
    before = sum(t.nbytes for f in source.glob("*.safetensors") for t in load_file(f).values())
    after = [t for f in (tmp_path / "out").glob("*.safetensors") for t in load_file(f).values()]
    assert report.bytes_before == before
    assert report.bytes_after == sum(t.nbytes for t in after)


def test_the_report_counts_activations_out_of_range(llama, tmp_path):
    _, source = llama
    report = quantize(source, tmp_path / "out", "fp8-static", percentile=90.0)
    shares = [layer.saturated for layer in report.layers]
    assert all(0.05 < share <= 0.1 for share in shares)


def test_a_weight_on_the_grid_is_reported_exact(tmp_path):
    model = build_wide("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    # 448 in every row makes the scale 1.
    weight.copy_(torch.randint(-8, 9, weight.shape))
    weight[:, 0] = 448
    model.save_pretrained(tmp_path / "source")
    report = quantize(tmp_path / "source", tmp_path / "out", "fp8-dynamic")
    exact = [layer.name for layer in report.layers if layer.sqnr_db is None]
    assert exact == ["model.layers.0.mlp.up_proj"]


def test_the_files_beside_the_weights_come_along(llama, tmp_path):
    _, source = llama
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "pytorch_model.bin").write_bytes(b"old weights")
    (tmp_path / "source" / "modeling_x.py").write_text("")
    quantize(tmp_path / "source", tmp_path / "out", "fp8-dynamic")
    shards = {file.name for file in source.glob("*.safetensors")}
    assert len(shards) > 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *shards,
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "quantization_report.json",
        "tokenizer.json",
    }
    assert not (tmp_path / "out.partial").exists()
