"""FourierFT, C3A, HiRA, MiSS and DeLoRA: changes of the weight in forms of their own."""

import peft
import pytest

from branchline.adapters.lowering import c3a, delora, fourierft, hira, miss
from branchline.adapters.lowering.base import BaseLinear
from branchline.core.errors import AdapterMismatchError, AdapterUnsupportedError
from tests.adapters.lowering.peft_linear import Adapted, conv1d, linear

LAYERS = {
    "linear": lambda: linear(32, 24),
    "without-bias": lambda: linear(24, 32, bias=False),
    "conv1d": lambda: conv1d(32, 48),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("number", "seed"), [(1, 777), (50, 0), (768, 1)])
def test_fourierft(layer, number, seed):
    config = peft.FourierFTConfig(n_frequency=number, scaling=90.0, random_loc_seed=seed)
    adapted = Adapted(config, LAYERS[layer]())
    settings = fourierft.FourierFTSettings(number, 90.0, seed)
    adapted.expect(fourierft.lower(adapted.tensors, settings, adapted.base()))


def test_more_coefficients_than_numbers_are_refused():
    with pytest.raises(AdapterMismatchError, match="769 coefficients"):
        fourierft.shapes(fourierft.FourierFTSettings(769, 1.0, 0), BaseLinear("proj", 32, 24))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "size"), [((32, 24), 8), ((32, 24), 1), ((30, 45), 15)])
def test_c3a(bias, shape, size):
    adapted = Adapted(peft.C3AConfig(block_size=size), linear(*shape, bias), spread=3.0)
    settings = c3a.C3aSettings(size)
    adapted.expect(c3a.lower(adapted.tensors, settings, adapted.base()))


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(AdapterMismatchError, match="blocks of 16"):
        c3a.shapes(c3a.C3aSettings(16), BaseLinear("proj", 32, 24))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rank", [1, 6])
def test_hira(layer, rank):
    adapted = Adapted(peft.HiraConfig(r=rank), LAYERS[layer]())
    settings = hira.HiraSettings(rank)
    adapted.expect(hira.lower(adapted.tensors, settings, adapted.base()))
    with pytest.raises(AdapterUnsupportedError, match="needs the base weight"):
        hira.lower(adapted.tensors, settings, adapted.base(weight=None))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rank", "inputs"), [(1, 32), (8, 32), (7, 32), (32, 32)])
@pytest.mark.parametrize("variant", ["miss", "mini"])
def test_miss(bias, rank, inputs, variant):
    options = {"init_weights": "mini", "mini_r": 6} if variant == "mini" else {}
    adapted = Adapted(peft.MissConfig(r=rank, **options), linear(inputs, 24, bias))
    settings = miss.MissSettings(rank, variant, 6)
    parts = miss.lower(adapted.tensors, settings, adapted.base())
    adapted.expect(parts)
    assert parts.shrink_rank == rank


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        (miss.MissSettings(4, "bat"), AdapterUnsupportedError, "'bat'"),
        (miss.MissSettings(33), AdapterMismatchError, "r 33"),
        (miss.MissSettings(4, "mini", 5), AdapterMismatchError, "5 columns"),
    ],
)
def test_what_miss_cannot_do_is_refused(settings, error, text):
    with pytest.raises(error, match=text):
        miss.shapes(settings, BaseLinear("proj", 32, 24))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [1, 6])
def test_delora(bias, rank):
    adapted = Adapted(peft.DeloraConfig(r=rank, delora_lambda=3.0), linear(32, 24, bias))
    adapted.expect(delora.lower(adapted.tensors, delora.DeloraSettings(rank), adapted.base()))
    tensors = adapted.tensors
    # Directions shorter than the floor of their norms.
    for name in ("delora_A", "delora_B"):
        tensors[name] *= 1e-6
    layer = adapted.model.base_model.model.net["proj"]
    layer.delora_A["default"].data *= 1e-6
    layer.delora_B["default"].data *= 1e-6
    layer.delora_lambda["default"].data *= 1e8
    tensors["delora_lambda"] *= 1e8
    adapted.expect(delora.lower(tensors, delora.DeloraSettings(rank), adapted.base()))
