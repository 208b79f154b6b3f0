"""torch's grouped matmul: what it is called with, checked by torch itself and by the definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType

from branchline.core.errors import ContractError, KernelUnavailableError
from branchline.core.platform import detect_platform
from branchline.core.scheme import SCHEMES
from branchline.linear.contract import InputContract
from branchline.linear.experts.kernels.base import GroupedConfig
from branchline.linear.experts.kernels.torch_grouped import TorchScaledExperts
from branchline.linear.experts.pairs import Pairs
from branchline.linear.kernels.base import LinearConfig
from tests.linear.experts.grouped import (
    NAME,
    ROUTINGS,
    assert_close,
    build,
    codes_for,
    random_pairs,
    routed,
    rows_for,
)
from tests.linear.kernels.cases import ROWWISE, assert_same

SCHEMES_OF = pytest.mark.parametrize("scheme", ROWWISE.values(), ids=list(ROWWISE))
ROUNDED_TWICE = 2.0**-8


def library(a, b, scale_a, recipe_a, scale_b, recipe_b, *, offs, output_dtype):
    """`scaled_grouped_mm` of a scale a row, as its documentation has it."""
    assert recipe_a == recipe_b == [ScalingType.RowWise]
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(t) for t in (a, b, scale_a[0], scale_b[0], offs)]
        # The older call has the checks of the device's kernel.
        checked = torch._scaled_grouped_mm(*faked, out_dtype=output_dtype)
    assert all(size % 16 == 0 for size in b.shape[1:])
    out = torch.full((a.shape[0], b.shape[2]), torch.nan)
    begin = 0
    for expert, end in enumerate(offs.tolist()):
        product = a[begin:end].float() @ b[expert].float()
        out[begin:end] = product * scale_a[0][begin:end, None] * scale_b[0][expert]
        begin = end
    assert checked.shape == out.shape
    return out.to(output_dtype)


@pytest.fixture(autouse=True)
def _library(request, monkeypatch):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(F, "scaled_grouped_mm", library)


@SCHEMES_OF
@pytest.mark.parametrize("routing", ROUTINGS)
def test_against_the_emulated_kernel(scheme, routing):
    experts = 8 if routing == "top-8" else 4
    both = build(TorchScaledExperts, scheme, (experts, 48, 64))
    pairs = routed(routing, experts)
    for by_token in (True, False):
        x = rows_for(pairs, 64, by_token=by_token)
        out = both.kernel.apply(x, pairs, NAME, by_token=by_token)
        assert_close(both, x, pairs, out, by_token=by_token)
        codes = codes_for(x, both.kernel)
        assert_same(out, both.kernel.apply(codes, pairs, NAME, by_token=by_token))


@SCHEMES_OF
def test_a_bias_is_added_behind_the_library(scheme):
    both = build(TorchScaledExperts, scheme, (3, 48, 64), bias=True)
    pairs = Pairs.of(torch.tensor([[4, 0], [2, 3], [3, 4], [0, 2]]), 3, partial=True)
    x = rows_for(pairs, 64, by_token=True)
    out = both.kernel.apply(x, pairs, NAME, by_token=True)
    assert_close(both, x, pairs, out, by_token=True, accumulation=ROUNDED_TWICE)
    plain = build(TorchScaledExperts, scheme, (3, 48, 64)).kernel
    before = plain.apply(x, pairs, NAME, by_token=True)
    here = pairs.expert < 3
    bias = both.kernel.bias()[pairs.expert[here]]
    assert_same(out[here], (before[here].float() + bias).bfloat16())


@SCHEMES_OF
def test_no_tokens(scheme):
    both = build(TorchScaledExperts, scheme, (4, 32, 64))
    pairs = Pairs.of(torch.empty(0, 2, dtype=torch.int64), 4)
    x = torch.empty(0, 64, dtype=torch.bfloat16)
    assert both.kernel.apply(x, pairs, NAME, by_token=True).shape == (0, 32)


@SCHEMES_OF
def test_the_weights_come_back_to_the_bit(scheme):
    both = build(TorchScaledExperts, scheme, (3, 32, 64))
    back = both.kernel.quantized_weight()
    for own, other in zip(back.experts, both.weight.experts, strict=True):
        assert_same(own.codes, other.codes)
        assert_same(own.scale, other.scale)
    # One scale in all is repeated for every channel.
    assert both.kernel.weight_bytes - both.weight.nbytes in (0, 3 * 32 * 4)


def test_what_it_would_round_silently_is_refused():
    both = build(TorchScaledExperts, SCHEMES["fp8-dynamic"], (4, 32, 64))
    pairs = routed("some", 4)
    for dtype in (torch.float16, torch.float32):
        x = rows_for(pairs, 64, by_token=True, dtype=dtype)
        with pytest.raises(ContractError, match="for bfloat16 activations"):
            both.kernel.apply(x, pairs, NAME, by_token=True)


def test_blocks_are_refused_when_it_is_built():
    scheme = SCHEMES["fp8-block"]
    weight = build(TorchScaledExperts, SCHEMES["fp8-dynamic"], (2, 128, 128)).weight
    key = TorchScaledExperts.consumes(GroupedConfig(2, LinearConfig(128, 128, scheme)))
    with pytest.raises(KernelUnavailableError, match="no scaled matmul of fp8-channel"):
        TorchScaledExperts(weight, None, InputContract(key))


@pytest.mark.gpu
@SCHEMES_OF
@pytest.mark.parametrize("bias", [False, True])
def test_the_library_itself(scheme, bias):
    config = GroupedConfig(16, LinearConfig(512, 384, scheme))
    verdict = TorchScaledExperts.serves(config, detect_platform("cuda"))
    if not verdict.ok:
        pytest.skip(verdict.reason)
    both = build(TorchScaledExperts, scheme, (16, 384, 512), bias, "cuda")
    for tokens in (1, 3, 65, 700):
        pairs = random_pairs(tokens, 4, 16, "cuda")
        for by_token in (True, False):
            x = rows_for(pairs, 512, by_token=by_token, device="cuda")
            out = both.kernel.apply(x, pairs, NAME, by_token=by_token)
            # Hopper adds FP8 products with 14 bits or so.
            assert_close(both, x, pairs, out, by_token=by_token, accumulation=2.0**-9)
