"""Gates and ups of an expert, stacked to the bit."""

from __future__ import annotations

import pytest
import torch

from branchline.core.errors import CheckpointError
from branchline.core.platform import Platform
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from branchline.core.scheme import (
    BLOCK_128,
    BLOCK_128_UE8M0,
    MX_WEIGHT,
    NVFP4_WEIGHT,
    PER_CHANNEL,
    PER_TENSOR,
    SCHEMES,
    WeightScheme,
)
from branchline.linear.checkpoint.document import Document
from branchline.linear.checkpoint.experts import common_contract, halves_scheme, stack_halves
from branchline.linear.checkpoint.metadata import parse_document
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.kernels.selection import select_kernel
from branchline.linear.quantized_weight import QuantizedWeight
from tests.linear.checkpoint.samples import ct, fp8, normal

H100 = Platform("cuda", (9, 0), "2.13", "3.9", None, cuda_version=(12, 9))


def halves(scheme, features, second=None):
    gate = QuantizedWeight.from_float(normal(features, 256, seed=1), "gate", scheme)
    up = QuantizedWeight.from_float(normal(features, 256, seed=2) * 3, "up", second or scheme)
    return gate, up


def stacked(gate, up):
    scheme = halves_scheme([gate.scheme, up.scheme], gate.out_features, "x")
    return stack_halves([gate, up], scheme, "x").check("x")


@pytest.mark.parametrize(
    ("scheme", "features", "wanted"),
    [
        (PER_TENSOR, 96, PER_CHANNEL),
        (PER_CHANNEL, 96, PER_CHANNEL),
        (BLOCK_128, 256, BLOCK_128),
        (BLOCK_128, 192, WeightScheme(64, 128)),
        (BLOCK_128, 200, WeightScheme(1, 128)),
        (BLOCK_128, 7, WeightScheme(1, 128)),
        (BLOCK_128_UE8M0, 192, None),
        (MX_WEIGHT, 100, MX_WEIGHT),
    ],
)
def test_nothing_is_requantised(scheme, features, wanted):
    gate, up = halves(scheme, features)
    both = stacked(gate, up)
    assert torch.equal(both.dequantize(), torch.cat([gate.dequantize(), up.dequantize()]))
    if wanted is not None:
        assert both.scheme == wanted
    codes = torch.cat([gate.codes.view(torch.uint8), up.codes.view(torch.uint8)])
    assert torch.equal(both.codes.view(torch.uint8), codes)


def test_a_scale_a_tensor_goes_with_one_a_channel():
    gate, up = halves(PER_TENSOR, 64, PER_CHANNEL)
    both = stacked(gate, up)
    assert both.scheme == PER_CHANNEL
    assert torch.equal(both.dequantize(), torch.cat([gate.dequantize(), up.dequantize()]))


def test_schemes_that_no_one_scheme_holds():
    with pytest.raises(CheckpointError, match="quantised differently") as caught:
        halves_scheme([BLOCK_128, PER_CHANNEL], 128, "experts.gate_up_proj")
    assert caught.value.subject == "experts.gate_up_proj"
    with pytest.raises(CheckpointError, match="quantised differently"):
        halves_scheme([BLOCK_128, WeightScheme(64, 128)], 128, "x")


def test_global_scales_must_be_one():
    gate, up = halves(NVFP4_WEIGHT, 64)
    with pytest.raises(CheckpointError, match="global scales"):
        stacked(gate, up)
    both = stacked(gate, gate)
    assert torch.equal(both.dequantize(), torch.cat([gate.dequantize()] * 2))


def test_the_largest_static_scale_is_everyones():
    contracts = [
        InputContract(FP8_STATIC_TENSOR, InputScale.checked(scale, "x", "checkpoint"))
        for scale in (0.25, 0.5, 0.125)
    ]
    found = common_contract(contracts, "x")
    assert found.key == FP8_STATIC_TENSOR
    assert found.static_scale("x").number == 0.5
    with pytest.raises(CheckpointError, match="different inputs"):
        common_contract([*contracts, InputContract(FP8_DYNAMIC_TOKEN)], "x")


def schemes_of(config):
    return [rule.group.scheme for rule in parse_document(Document("config.json", config)).rules]


@pytest.mark.parametrize("block", [[128, 128], (128, 128)])
def test_a_block_however_written_takes_the_fast_path(block):
    (scheme,) = schemes_of(fp8(weight_block_size=block))
    assert scheme == SCHEMES["fp8-block"]
    kernel = select_kernel(LinearConfig(256, 256, scheme), H100, None, "x").kernel
    assert not kernel.emulated
    assert kernel.name == "torch-scaled-mm"


@pytest.mark.parametrize("value", ["128x128", [128], [128, 0], [128.0, 128.0], [True, 128]])
def test_a_block_that_is_none_is_refused_by_key_and_value(value):
    with pytest.raises(CheckpointError, match="weight_block_size is") as caught:
        schemes_of(fp8(weight_block_size=value))
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [[128], [128, 0], [128.0, 128.0], [True, 128]])
def test_a_block_structure_too(value):
    config = ct({"strategy": "block", "block_structure": value})
    with pytest.raises(CheckpointError, match=r"group_0\.weights\.block_structure is") as caught:
        schemes_of(config)
    assert repr(value) in str(caught.value)
