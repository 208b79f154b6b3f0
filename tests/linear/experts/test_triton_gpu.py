"""The grouped Triton kernels on a GPU, against the emulated one on the same device."""

from __future__ import annotations

import pytest
import torch

from branchline.core.platform import detect_platform
from branchline.linear.experts.kernels.base import GroupedConfig
from branchline.linear.experts.kernels.triton import combine as combine_module
from branchline.linear.experts.kernels.triton.fp8 import (
    TritonBlockScaledExperts,
    TritonRowwiseExperts,
)
from branchline.linear.experts.pairs import Pairs, combine_defined
from branchline.linear.kernels.base import LinearConfig
from tests.linear.experts.grouped import (
    NAME,
    assert_close,
    build,
    codes_for,
    random_pairs,
    rows_for,
)
from tests.linear.kernels.cases import BLOCKS, ROWWISE, assert_same

pytestmark = pytest.mark.gpu

EVERY = [(TritonRowwiseExperts, name, scheme) for name, scheme in ROWWISE.items()] + [
    (TritonBlockScaledExperts, name, scheme) for name, scheme in BLOCKS.items()
]
TOKENS = (1, 3, 17, 65, 700)
#: Hopper adds FP8 products with 14 bits or so, 128 columns at a time.
ACCUMULATION = 2.0**-10

each = pytest.mark.parametrize(
    ("cls", "scheme"), [e[::2] for e in EVERY], ids=[e[1] for e in EVERY]
)


def built(cls, scheme, shape, bias=False):
    experts, n, k = shape
    verdict = cls.serves(
        GroupedConfig(experts, LinearConfig(k, n, scheme)), detect_platform("cuda")
    )
    if not verdict.ok:
        pytest.skip(verdict.reason)
    return build(cls, scheme, shape, bias, "cuda")


@each
@pytest.mark.parametrize("shape", [(16, 512, 1024), (5, 100, 300), (3, 1, 1), (64, 384, 2048)])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_against_the_emulated_kernel(cls, scheme, shape, top_k):
    both = built(cls, scheme, shape, bias=True)
    for tokens in TOKENS:
        pairs = random_pairs(tokens, min(top_k, shape[0]), shape[0], "cuda")
        for by_token in (True, False):
            x = rows_for(pairs, shape[2], by_token=by_token, device="cuda")
            out = both.kernel.apply(x, pairs, NAME, by_token=by_token)
            assert_close(both, x, pairs, out, by_token=by_token, accumulation=ACCUMULATION)
            codes = codes_for(x, both.kernel)
            assert_same(out, both.kernel.apply(codes, pairs, NAME, by_token=by_token))


@each
@pytest.mark.parametrize("shape", [(16, 512, 4096), (5, 100, 300)])
def test_a_pair_s_bytes_do_not_depend_on_other_tokens(cls, scheme, shape):
    experts, _, k = shape
    both = built(cls, scheme, shape, bias=True)
    chosen = torch.randint(experts, (5000, 2), generator=torch.Generator().manual_seed(0)).cuda()
    whole_pairs = Pairs.of(chosen, experts)
    x = rows_for(whole_pairs, k, by_token=True, device="cuda")
    whole = both.kernel.apply(x, whole_pairs, NAME, by_token=True)[whole_pairs.position]
    for tokens in (1, 2, 16, 65, 300, 1100):
        pairs = Pairs.of(chosen[-tokens:], experts)
        out = both.kernel.apply(x[-tokens:], pairs, NAME, by_token=True)
        assert_same(out[pairs.position], whole[-2 * tokens :])
    # Among others on one expert, and beside tokens of NaN.
    chosen[:-1] = chosen[-1, 0]
    x[:-1] = torch.nan
    pairs = Pairs.of(chosen, experts)
    out = both.kernel.apply(x, pairs, NAME, by_token=True)[pairs.position]
    assert_same(out[-2:], whole[-2:])


@each
def test_an_expert_gives_the_bytes_of_its_linear(cls, scheme):
    both = built(cls, scheme, (4, 512, 1024), bias=True)
    linear = cls.linear(both.weight.experts[2], both.kernel.bias()[2], both.kernel.contract)
    for tokens in TOKENS:
        pairs = Pairs.of(torch.full((tokens, 1), 2, device="cuda"), 4)
        x = rows_for(pairs, 1024, by_token=True, device="cuda")
        assert_same(both.kernel.apply(x, pairs, NAME, by_token=True), linear.apply(x, NAME))


@each
def test_nothing_waits_for_the_device(cls, scheme):
    """A capture refuses whoever does."""
    both = built(cls, scheme, (16, 512, 1024))
    chosen = torch.randint(16, (40, 2), device="cuda")
    x = rows_for(Pairs.of(chosen, 16), 1024, by_token=True, device="cuda")
    codes, weights = codes_for(x, both.kernel), torch.rand(40, 2, device="cuda")

    def forward():
        pairs = Pairs.of(chosen, 16)
        return both.kernel.combine(
            both.kernel.multiply(codes, pairs, by_token=True), weights, pairs
        )

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    # Other choices, other numbers of pairs an expert.
    for value in (3, 11):
        chosen.fill_(value)
        chosen[::2, 1] = 0
        graph.replay()
        assert_same(captured, forward())


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_combine_is_the_definition_to_the_bit(top_k, dtype):
    pairs = random_pairs(300, top_k, 16, "cuda")
    out = torch.randn(len(pairs), 2050, device="cuda").to(dtype)
    weights = torch.rand(300, top_k, device="cuda")
    assert_same(combine_module.combine(out, weights, pairs), combine_defined(out, weights, pairs))


def test_choices_of_no_expert_add_nothing():
    cls, _, scheme = EVERY[0]
    both = build(cls, scheme, (3, 64, 256), device="cuda")
    given = torch.tensor([[7, 0], [2, -1], [3, -(2**40)], [0, 2]], device="cuda")
    pairs = Pairs.of(given, 3)
    assert pairs.partial
    out = both.kernel.apply(
        rows_for(pairs, 256, by_token=True, device="cuda"), pairs, NAME, by_token=True
    )
    out[pairs.bounds[-1] :] = torch.nan
    total = both.kernel.combine(out, torch.ones(4, 2, device="cuda"), pairs)
    assert bool(total.isfinite().all())
    assert bool((total[2] == 0).all())
