"""IA3, BEFT, RoAd, VeRA and LN tuning: types that train vectors."""

import peft
import pytest
import torch
from torch import nn

from branchline.adapters.lowering import beft, ia3, ln_tuning, road, vera
from branchline.adapters.lowering.base import BaseLinear
from branchline.core.errors import AdapterFormatError, AdapterMismatchError
from tests.adapters.lowering.peft_linear import Adapted, Net, conv1d, linear

LAYERS = {
    "linear": lambda: linear(32, 24),
    "without-bias": lambda: linear(24, 32, bias=False),
    "conv1d": lambda: conv1d(32, 48),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("is_feedforward", [False, True])
def test_ia3(layer, is_feedforward):
    config = peft.IA3Config(
        target_modules=["proj"], feedforward_modules=["proj"] if is_feedforward else []
    )
    adapted = Adapted(config, LAYERS[layer]())
    parts = ia3.lower(adapted.tensors, ia3.Ia3Settings(is_feedforward), adapted.base())
    adapted.expect(parts)
    assert parts.changes_input == parts.reads_raw == is_feedforward


def test_ia3_of_the_other_kind_is_refused():
    config = peft.IA3Config(target_modules=["proj"], feedforward_modules=["proj"])
    adapted = Adapted(config, linear(32, 32))
    with pytest.raises(AdapterMismatchError, match=r"ia3_l is \(1, 32\), and \(32, 1\)"):
        ia3.lower(adapted.tensors, ia3.Ia3Settings(False), adapted.base())


@pytest.mark.parametrize("bias", [False, True])
def test_beft(bias):
    adapted = Adapted(peft.BeftConfig(target_modules=["proj"]), linear(32, 24, bias))
    parts = beft.lower(adapted.tensors, beft.BeftSettings(), adapted.base())
    adapted.expect(parts)
    assert not parts.reads_raw


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", ["road_1", "road_2", "road_4"])
@pytest.mark.parametrize("group", [2, 8, 24])
def test_road(bias, variant, group):
    config = peft.RoadConfig(variant=variant, group_size=group)
    adapted = Adapted(config, linear(32, 24, bias))
    settings = road.RoadSettings(variant, group)
    parts = road.lower(adapted.tensors, settings, adapted.base())
    adapted.expect(parts)
    assert not parts.reads_raw


@pytest.mark.parametrize("group", [3, 16])
def test_a_group_that_does_not_fit_is_refused(group):
    with pytest.raises(AdapterMismatchError, match=f"groups of {group}"):
        road.shapes(road.RoadSettings(group_size=group), BaseLinear("proj", 32, 24))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rank", [1, 7])
@pytest.mark.parametrize("is_saved", [False, True])
def test_vera(layer, rank, is_saved):
    config = peft.VeraConfig(r=rank, projection_prng_key=7, save_projection=is_saved)
    adapted = Adapted(config, LAYERS[layer]())
    base = adapted.base()
    if is_saved:
        saved = adapted.saved()
        shared = vera.VeraProjections(
            saved["base_model.vera_A"],
            saved["base_model.vera_B"],
        )
    else:
        shared = vera.regenerate(7, rank, base.in_features, base.out_features)
    parts = vera.lower(adapted.tensors, vera.VeraSettings(rank, shared), base)
    adapted.expect(parts)
    assert parts.shrink_rank == rank


def test_a_vera_of_a_rank_that_no_slot_holds_is_dense():
    adapted = Adapted(peft.VeraConfig(r=7, projection_prng_key=7), LAYERS["linear"]())
    base = adapted.base(max_rank=6)
    shared = vera.regenerate(7, 7, base.in_features, base.out_features)
    parts = vera.lower(adapted.tensors, vera.VeraSettings(7, shared), base)
    adapted.expect(parts)
    assert parts.low_rank is None
    assert parts.delta is not None


class Two(nn.Module):
    """Linears of different sizes, so that the shared projections fit neither exactly."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"wide": nn.Linear(48, 16), "tall": nn.Linear(16, 64)})

    def forward(self, x):
        return self.net["tall"](self.net["wide"](x))


@pytest.mark.parametrize("key", [0, 123456])
def test_vera_regenerates_the_shared_projections_bit_for_bit(key):
    config = peft.VeraConfig(r=5, projection_prng_key=key, target_modules=["wide", "tall"])
    model = peft.get_peft_model(Two(), config)
    shared = vera.regenerate(key, 5, 48, 64)
    assert torch.equal(shared.a, model.base_model.vera_A["default"])
    assert torch.equal(shared.b, model.base_model.vera_B["default"])


def test_vera_takes_its_slice_of_wider_projections():
    adapted = Adapted(peft.VeraConfig(r=5), linear(32, 24))
    wide = vera.regenerate(3, 5, 40, 64)
    own = adapted.model.base_model
    own.vera_A["default"], own.vera_B["default"] = wide.a, wide.b
    adapted.expect(vera.lower(adapted.tensors, vera.VeraSettings(5, wide), adapted.base()))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((4, 32, 24), "4 rows"),
        ((5, 31, 24), "31 inputs"),
        ((5, 32, 23), "23 outputs"),
    ],
)
def test_vera_projections_that_do_not_fit_are_refused(sizes, text):
    adapted = Adapted(peft.VeraConfig(r=5), linear(32, 24))
    settings = vera.VeraSettings(5, vera.regenerate(0, *sizes))
    with pytest.raises(AdapterMismatchError, match=text):
        vera.lower(adapted.tensors, settings, adapted.base())


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(16), nn.LayerNorm(16, bias=False), nn.RMSNorm(16)],
    ids=["layer-norm", "without-bias", "rms-norm"],
)
def test_ln_tuning(norm):
    config = peft.LNTuningConfig(target_modules=["proj"])
    model = peft.get_peft_model(Net(norm), config).eval()
    for name, parameter in model.named_parameters():
        if "ln_tuning" in name:
            parameter.data += torch.randn_like(parameter)
    prefix = "base_model.model.net.proj.ln_tuning_layers."
    saved = peft.get_peft_model_state_dict(model)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    settings = ln_tuning.LnTuningSettings(has_bias=getattr(norm, "bias", None) is not None)
    weights = ln_tuning.lower(tensors, settings, "proj", 16)
    x = torch.randn(5, 16)
    with torch.no_grad():
        expected, plain = model(x), norm(x)
        shape, eps = norm.normalized_shape, norm.eps
        if isinstance(norm, nn.RMSNorm):
            actual = nn.functional.rms_norm(x, shape, weights.weight, eps)
        else:
            actual = nn.functional.layer_norm(x, shape, weights.weight, weights.bias, eps)
    assert (expected - plain).abs().max() > 1e-3
    assert torch.equal(actual, expected)


def test_a_norm_without_its_bias_is_refused():
    with pytest.raises(AdapterFormatError, match="lacks bias"):
        ln_tuning.lower({"weight": torch.ones(16)}, ln_tuning.LnTuningSettings(True), "norm", 16)
