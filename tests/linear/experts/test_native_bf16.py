"""Unquantised bfloat16 experts in C: each pair has the bytes of the linear's kernel on its row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from branchline.core.errors import ContractError, KernelUnavailableError, RawConsumerError
from branchline.core.scheme import SCHEMES
from branchline.linear.experts.kernels import packed
from branchline.linear.experts.kernels.each import FloatExperts
from branchline.linear.experts.kernels.native_bf16 import NativeBf16Experts
from branchline.linear.experts.kernels.native_fp8 import NativeFp8Experts
from branchline.linear.experts.pairs import Pairs
from branchline.linear.kernels.native_bf16 import NativeBf16Linear
from tests.linear.kernels.cases import assert_same, bits

from .grouped import NAME, ROUTINGS, build, codes_for, random_pairs, rows_for


@pytest.fixture(autouse=True)
def _outputs_full_of_nan(monkeypatch):
    def full(shape, dtype, device):
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(packed, "empty", full)


def experts(number: int, n: int, k: int, *, bias: bool = False):
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(number, n, k, generator=generator).bfloat16()
    return weight, torch.randn(number, n, generator=generator).bfloat16() if bias else None


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> NativeBf16Linear:
    made = nn.Linear(*reversed(weight.shape), bias=bias is not None, dtype=torch.bfloat16)
    made.weight.data = weight.clone()
    if bias is not None:
        made.bias.data = bias
    return NativeBf16Linear(made, keeps_weight=True)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("n", "k", "bias"), [(70, 130, True), (64, 257, False)])
def test_equal_to_the_linear(routing, n, k, bias):
    weight, biases = experts(9, n, k, bias=bias)
    kernel = NativeBf16Experts(weight, biases)
    linears = [linear(own, None if biases is None else biases[i]) for i, own in enumerate(weight)]
    for shift in (0, 1):
        index = torch.tensor(ROUTINGS[routing]) - shift
        pairs = Pairs.of(index, 9, partial=True)
        live = pairs.bounds[-1]
        for by_token in (True, False):
            x = rows_for(pairs, k, by_token=by_token)
            out = kernel.apply(x, pairs, NAME, by_token=by_token)
            assert bool(out[live:].isnan().all())
            for position in range(live):
                row = int(pairs.token[position]) if by_token else position
                own = linears[int(pairs.expert[position])].apply(x[row : row + 1], NAME)
                assert_same(out[position], own[0])


def test_near_torch():
    weight, bias = experts(4, 200, 300, bias=True)
    pairs = random_pairs(30, 2, 4)
    x = rows_for(pairs, 300, by_token=True)
    ours = NativeBf16Experts(weight, bias).apply(x, pairs, NAME, by_token=True).float()
    theirs = FloatExperts(weight, bias).apply(x, pairs, NAME, by_token=True).float()
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2**-7


def test_weights_come_back_to_the_bit():
    values = torch.randint(-(2**15), 2**15, (3, 70, 33), dtype=torch.int16)
    kernel = NativeBf16Experts(values.view(torch.bfloat16), None)
    assert_same(bits(kernel.unpacked()), bits(values))
    assert kernel.weight_bytes == 3 * 128 * 34 * 2


def test_what_it_cannot_do_is_refused():
    weight, _ = experts(3, 5, 8)
    with pytest.raises(KernelUnavailableError, match="bfloat16"):
        NativeBf16Experts(weight.float(), None)
    with pytest.raises(KernelUnavailableError, match="no columns"):
        NativeBf16Experts(weight[:, :, :0], None)
    kernel, pairs = NativeBf16Experts(weight, None), random_pairs(4, 2, 3)
    x = rows_for(pairs, 8, by_token=True)
    with pytest.raises(ContractError, match="takes bfloat16"):
        kernel.apply(x.float(), pairs, NAME, by_token=True)
    with pytest.raises(ContractError, match="takes rows of shape"):
        kernel.apply(x, pairs, NAME, by_token=False)
    with pytest.raises(ContractError, match="3 experts"):
        kernel.apply(x, random_pairs(4, 2, 5), NAME, by_token=True)
    codes = codes_for(x, build(NativeFp8Experts, SCHEMES["fp8-dynamic"], (3, 5, 8)).kernel)
    with pytest.raises(RawConsumerError):
        kernel.apply(codes, pairs, NAME, by_token=True)
