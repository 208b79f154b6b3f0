"""LoRA and its variants: PEFT's own layers are the measure."""

from dataclasses import replace

import peft
import pytest
import torch
from torch import nn

from branchline.adapters.lowering import adalora, lora
from branchline.adapters.lowering.base import BaseLinear
from branchline.core.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterUnsupportedError,
)
from tests.adapters.lowering.peft_linear import Adapted, Net, conv1d, linear

LAYERS = {
    "linear": lambda: linear(32, 24),
    "without-bias": lambda: linear(24, 32, bias=False),
    "conv1d": lambda: conv1d(32, 48),
}


def settings_of(config: peft.LoraConfig, **changes) -> lora.LoraSettings:
    values = {
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
    }
    return lora.LoraSettings(config.r, config.lora_alpha, **(values | changes))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rank", [1, 4, 13])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "use_rslora": True}],
    ids=str,
)
def test_it_computes_what_peft_computes(layer, rank, options):
    config = peft.LoraConfig(r=rank, lora_alpha=11, **options)
    adapted = Adapted(config, LAYERS[layer]())
    parts = lora.lower(adapted.tensors, settings_of(adapted.config), adapted.base())
    adapted.expect(parts)
    assert parts.shrink_rank == rank
    assert (parts.gain is not None) == config.use_dora


@pytest.mark.parametrize("layer", ["linear", "without-bias"])
def test_a_bias_on_lora_b_is_scaled_too(layer):
    config = peft.LoraConfig(r=4, lora_alpha=11, lora_bias=True)
    adapted = Adapted(config, LAYERS[layer]())
    parts = lora.lower(adapted.tensors, settings_of(adapted.config), adapted.base())
    adapted.expect(parts)
    assert torch.equal(parts.shift, adapted.tensors["lora_B.bias"] * (11 / 4))


@pytest.mark.parametrize("side", ["a", "b"])
def test_block_diagonal(side):
    blocks = peft.tuners.lora.BdLoraConfig(**{f"target_modules_bd_{side}": ["proj"]}, nblocks=4)
    adapted = Adapted(peft.LoraConfig(r=8, use_bdlora=blocks), linear(32, 24))
    settings = settings_of(adapted.config, **{f"{side}_blocks": 4})
    adapted.expect(lora.lower(adapted.tensors, settings, adapted.base()))


def test_plain_tensors_stay_as_stored():
    adapted = Adapted(peft.LoraConfig(r=4), linear(32, 24))
    stored = {name: tensor.bfloat16() for name, tensor in adapted.tensors.items()}
    parts = lora.lower(stored, settings_of(adapted.config), adapted.base(weight=None))
    assert torch.equal(parts.low_rank.a, stored["lora_A"])
    assert torch.equal(parts.low_rank.b, stored["lora_B"])
    assert parts.low_rank.a.dtype == torch.bfloat16


def test_dora_on_another_weight_is_that_of_the_weight_it_runs_on():
    adapted = Adapted(peft.LoraConfig(r=4, use_dora=True), linear(32, 24))
    adapted.weight = (adapted.weight * 8).round() / 8
    adapted.layer.weight.data = adapted.weight.clone()
    adapted.expect(lora.lower(adapted.tensors, settings_of(adapted.config), adapted.base()))


def test_dora_without_the_weight_is_refused():
    adapted = Adapted(peft.LoraConfig(r=4, use_dora=True), linear(32, 24))
    with pytest.raises(AdapterUnsupportedError, match="needs the base weight"):
        lora.lower(adapted.tensors, settings_of(adapted.config), adapted.base(weight=None))


def test_dora_on_a_zero_row_is_refused():
    layer = linear(32, 24)
    layer.weight.data[5] = 0
    adapted = Adapted(peft.LoraConfig(r=4, use_dora=True), layer)
    tensors = adapted.tensors
    tensors["lora_B"][5] = 0
    with pytest.raises(AdapterUnsupportedError, match="row 5"):
        lora.lower(tensors, settings_of(adapted.config), adapted.base())


def test_dora_with_a_bias_on_lora_b_is_refused():
    settings = lora.LoraSettings(4, 8, use_dora=True, lora_bias=True)
    with pytest.raises(AdapterUnsupportedError, match="lora_bias"):
        lora.lower({}, settings, BaseLinear("proj", 32, 24))


def test_blocks_that_do_not_divide_are_refused():
    settings = lora.LoraSettings(8, 8, a_blocks=3)
    with pytest.raises(AdapterMismatchError, match="3 diagonal blocks"):
        lora.lower({}, settings, BaseLinear("proj", 32, 24))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda t: t.pop("lora_B"), AdapterFormatError, "lacks lora_B"),
        (lambda t: t.update(lora_E=t["lora_A"]), AdapterFormatError, "no use for lora_E"),
        (lambda t: t.update(lora_A=t["lora_A"].T), AdapterMismatchError, r"\(32, 4\)"),
        (lambda t: t.update(lora_A=t["lora_A"].double()), AdapterUnsupportedError, "float64"),
        (
            lambda t: t.update(lora_A=t["lora_A"].to(torch.float8_e4m3fn)),
            AdapterUnsupportedError,
            "float8",
        ),
    ],
)
def test_other_tensors_are_refused(change, error, text):
    adapted = Adapted(peft.LoraConfig(r=4), linear(32, 24))
    tensors = adapted.tensors
    change(tensors)
    with pytest.raises(error, match=text):
        lora.lower(tensors, settings_of(adapted.config), adapted.base())


@pytest.mark.parametrize("use_rslora", [False, True])
def test_embedding(use_rslora):
    torch.manual_seed(0)
    embedding = nn.Embedding(40, 16)
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=use_rslora, target_modules=["proj"])
    model = peft.get_peft_model(Net(embedding), config).eval()
    for name, parameter in model.named_parameters():
        if ".default" in name:
            parameter.data += torch.randn_like(parameter)
    prefix = "base_model.model.net.proj."
    saved = peft.get_peft_model_state_dict(model)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    # PEFT saves a targeted embedding whole beside the adapter.
    tensors = {name: tensor for name, tensor in tensors.items() if "lora" in name}
    product = lora.lower_embedding(tensors, settings_of(config), "proj", 40, 16).low_rank
    tokens = torch.tensor([[0, 3, 39], [7, 7, 1]])
    with torch.no_grad():
        expected = model(tokens)
        rows = embedding.weight[tokens]
        actual = rows + product.scaling * (product.a[:, tokens].permute(1, 2, 0) @ product.b.T)
    assert (expected - rows).abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_dora_on_an_embedding_is_refused():
    settings = lora.LoraSettings(4, 8, use_dora=True)
    with pytest.raises(AdapterUnsupportedError, match="DoRA on an embedding"):
        lora.lower_embedding({}, settings, "embed", 40, 16)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("alpha", [8, 0])
@pytest.mark.parametrize("rank", [1, 12])
def test_adalora(layer, alpha, rank):
    config = peft.AdaLoraConfig(init_r=rank, lora_alpha=alpha, total_step=100)
    adapted = Adapted(config, LAYERS[layer]())
    settings = adalora.AdaLoraSettings(rank, rank, alpha)
    adapted.expect(adalora.lower(adapted.tensors, settings, adapted.base()))


@pytest.mark.parametrize("kept", [[0, 2, 3], [5], []], ids=str)
@pytest.mark.parametrize("alpha", [8, 0])
def test_adalora_cut_by_its_rank_pattern(kept, alpha, tmp_path):
    trained = Adapted(peft.AdaLoraConfig(init_r=6, lora_alpha=alpha, total_step=9), linear(32, 24))
    pattern = [index in kept for index in range(6)]
    trained.config.rank_pattern = {"net.proj.lora_E.default": pattern}
    trained.model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(Net(linear(32, 24)), str(tmp_path)).eval()
    prefix = "base_model.model.net.proj."
    saved = peft.utils.load_peft_weights(str(tmp_path))
    tensors = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    settings = adalora.AdaLoraSettings(len(kept), 6, alpha)
    trained.model = loaded
    parts = adalora.lower(tensors, settings, trained.base())
    if kept:
        trained.expect(parts)
    else:
        assert not parts.reads_raw
        x = trained.inputs()
        assert torch.equal(loaded(x), trained.layer_alone(x))


def test_settings_are_values():
    settings = lora.LoraSettings(4, 8)
    assert replace(settings, use_rslora=True).scaling == 4.0
    assert settings.scaling == 2.0
