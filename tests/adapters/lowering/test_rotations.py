"""OFT and BOFT: the input is rotated."""

import warnings

import peft
import pytest
import torch
from peft.tuners.boft import layer as boft_layer
from peft.tuners.oft.layer import OFTLayer

from branchline.adapters.lowering import boft, oft
from branchline.adapters.lowering.base import BaseLinear
from branchline.core.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterUnsupportedError,
)
from tests.adapters.lowering.peft_linear import Adapted, linear

SIZES = {"r": {"r": 4, "block_size": 0}, "block": {"r": 0, "block_size": 8}}
OPTIONS = [
    {},
    {"block_share": True},
    {"use_cayley_neumann": False},
    {"coft": True, "eps": 1e-1},
    {"coft": True, "eps": 1e3},
    {"coft": True, "eps": 1e-1, "block_share": True, "use_cayley_neumann": False},
    *({"num_cayley_neumann_terms": terms} for terms in (1, 2, 3, 4, 6)),
]


def oft_config(settings: oft.OftSettings) -> peft.OFTConfig:
    values = dict(vars(settings))
    return peft.OFTConfig(oft_block_size=values.pop("block_size"), **values)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_oft(options, sizes, bias):
    settings = oft.OftSettings(**(SIZES[sizes] | options))
    adapted = Adapted(oft_config(settings), linear(32, 24, bias), spread=0.1)
    stored = adapted.tensors
    parts = oft.lower(stored, settings, adapted.base())
    if options == {"num_cayley_neumann_terms": 1}:
        assert torch.equal(parts.rotation[0].blocks, torch.eye(8).repeat(4, 1, 1))
        return
    adapted.expect(parts)
    assert parts.changes_input


def test_an_exact_oft_keeps_lengths():
    settings = oft.OftSettings(r=4, block_size=0, use_cayley_neumann=False)
    adapted = Adapted(oft_config(settings), linear(32, 24))
    blocks = oft.lower(adapted.tensors, settings, adapted.base()).rotation[0].blocks
    torch.testing.assert_close(blocks @ blocks.mT, torch.eye(8).repeat(4, 1, 1))


@pytest.mark.parametrize("size", [1, 7, 32, 60])
def test_a_size_that_does_not_divide_is_moved_as_peft_moves_it(size):
    base = BaseLinear("proj", size, 8)
    for wanted in range(1, 70):
        expected = wanted
        if size % wanted or wanted > size:
            expected = OFTLayer.adjust_oft_parameters(None, size, wanted)
        assert oft.block_size(oft.OftSettings(0, wanted), base) == expected
        assert oft.block_size(oft.OftSettings(wanted, 0), base) == size // expected


@pytest.mark.parametrize("settings", [oft.OftSettings(0, 0), oft.OftSettings(4, 8)])
def test_oft_needs_one_of_number_and_size(settings):
    with pytest.raises(AdapterFormatError, match="one of them must be 0"):
        oft.shapes(settings, BaseLinear("proj", 32, 24))


def boft_config(settings: boft.BoftSettings) -> peft.BOFTConfig:
    return peft.BOFTConfig(
        boft_block_size=settings.block_size,
        boft_block_num=settings.block_num,
        boft_n_butterfly_factor=settings.factors,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [{"block_size": 8}, {"block_size": 0, "block_num": 8}], ids=str)
def test_boft(bias, sizes):
    settings = boft.BoftSettings(**sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = Adapted(boft_config(settings), linear(32, 24, bias))
    parts = boft.lower(adapted.tensors, settings, adapted.base())
    adapted.expect(parts)
    assert (parts.shift is not None) == bias
    assert [factor.order for factor in parts.rotation] == [None]
    with pytest.raises(AdapterUnsupportedError, match="needs the base bias"):
        boft.lower(adapted.tensors, settings, adapted.base(weight=None, bias=None))


class BlockDiagonal:
    """Stands in for PEFT's CUDA extension, without which it makes no butterflies."""

    @staticmethod
    def forward(blocks: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([torch.block_diag(*factor) for factor in blocks])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [32, 96])
@pytest.mark.parametrize("sizes", [{"block_size": 4}, {"block_size": 0, "block_num": 8}], ids=str)
@pytest.mark.parametrize("factors", [2, 3, 4])
def test_boft_butterflies(monkeypatch, bias, inputs, sizes, factors):
    monkeypatch.setattr(boft_layer, "get_fbd_cuda", lambda: BlockDiagonal)
    settings = boft.BoftSettings(**sizes, factors=factors)
    adapted = Adapted(boft_config(settings), linear(inputs, 24, bias))
    parts = boft.lower(adapted.tensors, settings, adapted.base())
    adapted.expect(parts)
    assert len(parts.rotation) == factors


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        (boft.BoftSettings(0, 0), AdapterFormatError, "one of them must be 0"),
        (boft.BoftSettings(4, 8), AdapterFormatError, "one of them must be 0"),
        (boft.BoftSettings(5), AdapterMismatchError, "6 blocks of 5"),
        (boft.BoftSettings(4, factors=5), AdapterMismatchError, "5 butterfly factors"),
        (boft.BoftSettings(1, factors=2), AdapterMismatchError, "2 butterfly factors"),
    ],
)
def test_boft_sizes_that_do_not_fit_are_refused(settings, error, text):
    with pytest.raises(error, match=text):
        boft.shapes(settings, BaseLinear("proj", 32, 24))
