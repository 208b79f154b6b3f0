"""The grouped Triton kernels in Triton's interpreter: every key, routing and odd shape."""

from __future__ import annotations

import pytest
import torch

from branchline.core.errors import ContractError, KernelUnavailableError
from branchline.core.platform import detect_platform
from branchline.core.quantized_activation import QuantizedActivation
from branchline.core.scheme import SCHEMES
from branchline.linear.contract import InputContract
from branchline.linear.experts import native as native_pairs
from branchline.linear.experts import pairs as pairs_module
from branchline.linear.experts.kernels.base import GroupedConfig
from branchline.linear.experts.kernels.selection import select_grouped_kernel
from branchline.linear.experts.kernels.triton import combine as combine_module
from branchline.linear.experts.kernels.triton import fp8
from branchline.linear.experts.kernels.triton.fp8 import (
    TritonBlockScaledExperts,
    TritonRowwiseExperts,
)
from branchline.linear.experts.kernels.triton.matmul import plan_pairs
from branchline.linear.experts.pairs import Pairs, combine_defined
from branchline.linear.experts.weight import ExpertsWeight
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.kernels.triton.plan import PLANS
from branchline.linear.quantized_weight import QuantizedWeight
from tests.interpreted import quick_interpreter
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
from tests.linear.kernels.cases import BLOCKS, ROWWISE, assert_same

pytestmark = pytest.mark.triton_interpreted

EVERY = {name: (TritonRowwiseExperts, scheme) for name, scheme in ROWWISE.items()} | {
    name: (TritonBlockScaledExperts, scheme) for name, scheme in BLOCKS.items()
}
MAIN = ("fp8-static", "fp8-dynamic", "fp8-block")


def each(names=tuple(EVERY)):
    return pytest.mark.parametrize(("cls", "scheme"), [EVERY[n] for n in names], ids=names)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """An element that no kernel writes is a NaN."""

    def unwritten(shape, dtype, device):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    for module in (fp8, combine_module):
        monkeypatch.setattr(module, "empty", unwritten)
    with quick_interpreter(monkeypatch):
        yield


# --- results -----------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize("by_token", [True, False])
def test_every_key_at_odd_sizes(cls, scheme, by_token):
    for n, k in ((70, 200), (1, 1)):
        both = build(cls, scheme, (4, n, k), bias=n > 1)
        pairs = routed("some", 4)
        x = rows_for(pairs, k, by_token=by_token)
        out = both.kernel.apply(x, pairs, NAME, by_token=by_token)
        assert_close(both, x, pairs, out, by_token=by_token)
        # Of the producer before it: codes of P rows, padded and laid out as it takes them.
        codes = codes_for(x, both.kernel)
        assert_same(out, both.kernel.apply(codes, pairs, NAME, by_token=by_token))


@each(MAIN)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(cls, scheme, routing):
    experts = 8 if routing == "top-8" else 4
    both = build(cls, scheme, (experts, 64, 144))
    pairs = routed(routing, experts)
    for by_token in (True, False):
        x = rows_for(pairs, 144, by_token=by_token)
        out = both.kernel.apply(x, pairs, NAME, by_token=by_token)
        assert_close(both, x, pairs, out, by_token=by_token)


@each(MAIN)
def test_no_tokens(cls, scheme):
    both = build(cls, scheme, (4, 64, 128))
    pairs = Pairs.of(torch.empty(0, 2, dtype=torch.int64), 4)
    for by_token in (True, False):
        out = both.kernel.apply(torch.empty(0, 128), pairs, NAME, by_token=by_token)
        assert out.shape == (0, 64)
    assert both.kernel.combine(out, torch.empty(0, 2), pairs).shape == (0, 64)


@each(MAIN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(cls, scheme, dtype):
    both = build(cls, scheme, (4, 40, 128), bias=True)
    pairs = routed("some", 4)
    x = rows_for(pairs, 128, by_token=True, dtype=dtype)
    out = both.kernel.apply(x, pairs, NAME, by_token=True)
    assert_close(both, x, pairs, out, by_token=True)


@each(MAIN)
def test_pairs_of_experts_elsewhere_are_not_written(cls, scheme):
    both = build(cls, scheme, (3, 70, 130), bias=True)
    # Experts 0 to 2 of five are here.
    pairs = Pairs.of(torch.tensor([[4, 0], [2, 3], [3, 4], [0, 2]]), 3, partial=True)
    here = pairs.expert < 3
    for by_token in (True, False):
        x = rows_for(pairs, 130, by_token=by_token)
        out = both.kernel.apply(x, pairs, NAME, by_token=by_token)
        assert_close(both, x, pairs, out, by_token=by_token)
        assert out[here].isfinite().all()
        assert out[~here].isnan().all()


@each(MAIN)
@pytest.mark.parametrize("by_token", [True, False])
def test_choices_of_no_expert_add_nothing(cls, scheme, by_token, monkeypatch):
    both = build(cls, scheme, (3, 32, 144), bias=True)
    given = torch.tensor([[7, 0], [2, -1], [3, -(2**40)], [0, 2]])
    with pytest.raises(ContractError, match="outside of 0 to 2"):
        Pairs.of(given, 3)
    # As where values lie on a device and nobody waits for them.
    monkeypatch.setattr(pairs_module, "can_look", lambda index: False)
    monkeypatch.setattr(native_pairs, "sorts", lambda index: False)
    pairs = Pairs.of(given, 3)
    x = rows_for(pairs, 144, by_token=by_token)
    out = both.kernel.apply(x, pairs, NAME, by_token=by_token)
    here = pairs.expert < 3
    assert bool(out[~here].isnan().all())
    assert bool(out[here].isfinite().all())
    weights = torch.rand(4, 2)
    total = both.kernel.combine(out, weights, pairs)
    kept = torch.where(((given >= 0) & (given < 3)), weights, 0.0)
    # Of rows that hold numbers, and weights of zero: the same sums.
    assert_same(total, combine_defined(out.nan_to_num(0.0), kept, pairs))
    assert bool((total[2] == 0).all())


@each(MAIN)
def test_nan_reaches_its_pairs_only(cls, scheme):
    both = build(cls, scheme, (4, 33, 130))
    pairs = routed("some", 4)
    x = rows_for(pairs, 130, by_token=True)
    x[3, 7] = torch.nan
    out = both.kernel.apply(x, pairs, NAME, by_token=True)
    assert out[pairs.token == 3].isnan().all()
    assert out[pairs.token != 3].isfinite().all()


# --- row isolation -----------------------------------------------------------------------------


def exact_values(cls, scheme, experts: int, n: int, k: int):
    """A kernel and an activation whose sums are exact in any order: NumPy's is not hardware's."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-2, 3, (experts, n, k), generator=generator)
    x = torch.randint(-2, 3, (150, k), generator=generator)
    weight[:, :, ::100] = x[:, ::100] = 2  # then every code is a multiple of 224
    both = build(cls, scheme, (experts, n, k), bias=True, values=weight.float())
    return both.kernel, x.bfloat16() * 0.37


@each(MAIN)
@pytest.mark.parametrize("k", [304, 300])
def test_a_pair_s_bytes_do_not_depend_on_how_many_share_its_expert(cls, scheme, k):
    """Nor on the plan: each of them is one of the numbers of tokens'."""
    kernel, x = exact_values(cls, scheme, 2, 70, k)
    alone = torch.cat(
        [
            kernel.apply(x[:1], Pairs.of(torch.tensor([[expert]]), 2), NAME, by_token=True)
            for expert in (0, 1)
        ]
    )
    plans = set()
    for tokens, on_first in ((2, 1), (20, 17), (70, 70), (150, 3), (150, 150)):
        chosen = torch.ones(tokens, 1, dtype=torch.int64)
        chosen[:on_first] = 0
        if on_first < tokens:
            chosen[0] = 1
        pairs = Pairs.of(chosen, 2)
        out = kernel.apply(x[:tokens], pairs, NAME, by_token=True)
        assert_same(out[pairs.position[0]], alone[chosen[0, 0]])
        plans.add(plan_pairs(tokens, 2, k)[0])
    assert plans == set(PLANS[3:] if k % 16 else PLANS[:3])


@each(MAIN)
def test_what_other_tokens_hold_does_not_show(cls, scheme):
    both = build(cls, scheme, (4, 64, 200))
    pairs = random_pairs(24, 2, 4)
    x = rows_for(pairs, 200, by_token=True)
    whole = both.kernel.apply(x, pairs, NAME, by_token=True)
    x[::2] = torch.nan
    out = both.kernel.apply(x, pairs, NAME, by_token=True)
    kept = pairs.token % 2 == 1
    assert_same(out[kept], whole[kept])


@each(MAIN)
def test_an_expert_gives_the_bytes_of_its_linear(cls, scheme):
    both = build(cls, scheme, (3, 70, 200), bias=True)
    pairs = Pairs.of(torch.tensor([[1], [1], [1]]), 3)
    x = rows_for(pairs, 200, by_token=True)
    linear = cls.linear(both.weight.experts[1], both.kernel.bias()[1], both.kernel.contract)
    assert_same(both.kernel.apply(x, pairs, NAME, by_token=True), linear.apply(x, NAME))


# --- the sum over choices ----------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_combine_is_the_definition_to_the_bit(routing, dtype):
    pairs = routed(routing, 8)
    generator = torch.Generator().manual_seed(0)
    for columns in (1, 1030):
        out = torch.randn(len(pairs), columns, generator=generator).to(dtype)
        for weights_dtype in (torch.float32, torch.bfloat16):
            weights = torch.rand(pairs.top_k, pairs.tokens, generator=generator).t()
            weights = weights.to(weights_dtype)
            wanted = combine_defined(out, weights, pairs)
            assert_same(combine_module.combine(out, weights, pairs), wanted)


def test_combine_leaves_out_what_nobody_computed():
    pairs = Pairs.of(torch.tensor([[4, 0], [2, 3], [3, 4], [0, 2]]), 3, partial=True)
    out = torch.randn(len(pairs), 20)
    out[pairs.expert == 3] = torch.nan
    weights = torch.rand(4, 2)
    found = combine_module.combine(out, weights, pairs)
    assert found.isfinite().all()
    assert_same(found, combine_defined(out, weights, pairs))
    assert not found[2].any()
    with pytest.raises(ContractError, match="for 4 tokens with 2 choices each"):
        combine_module.combine(out, weights[:3], pairs)


# --- what it keeps, and what it refuses --------------------------------------------------------


@each()
def test_the_weights_come_back_to_the_bit(cls, scheme):
    both = build(cls, scheme, (3, 130, 260))
    back = both.kernel.quantized_weight()
    for own, other in zip(back.experts, both.weight.experts, strict=True):
        assert_same(own.codes, other.codes)
        assert_same(own.scale, other.scale)
        assert (own.scheme, own.in_features) == (other.scheme, 260)
    assert both.kernel.weight_bytes == both.weight.nbytes
    assert torch.equal(both.kernel.dequantized(), both.weight.dequantize())


def test_scales_in_one_byte_come_back_so():
    scheme = SCHEMES["fp8-block-ue8m0"]
    both = build(TritonBlockScaledExperts, scheme, (2, 200, 256))
    weight = ExpertsWeight(
        tuple(
            QuantizedWeight(own.codes, own.scale.to(torch.float8_e8m0fnu), own.scheme, 256)
            for own in both.weight.experts
        )
    )
    kernel = TritonBlockScaledExperts(weight, None, both.kernel.contract)
    for own, other in zip(kernel.quantized_weight().experts, weight.experts, strict=True):
        assert_same(own.scale, other.scale)
    pairs = Pairs.of(torch.tensor([[1], [0]]), 2)
    x = rows_for(pairs, 256, by_token=True)
    assert_same(
        kernel.apply(x, pairs, NAME, by_token=True),
        both.kernel.apply(x, pairs, NAME, by_token=True),
    )


def test_chosen_in_the_interpreter():
    here = detect_platform("cpu")
    assert here.interpreted
    for name in MAIN:
        config = GroupedConfig(4, LinearConfig(70, 50, SCHEMES[name]))
        assert select_grouped_kernel(config, here).kernel is EVERY[name][0]


def test_wrong_rows_and_weights_are_refused():
    cls, scheme = EVERY["fp8-dynamic"]
    both = build(cls, scheme, (4, 16, 64))
    pairs = routed("some", 4)
    with pytest.raises(ContractError, match=r"\(10, 64\), its input has shape \(5, 64\)"):
        both.kernel.apply(torch.ones(5, 64), pairs, NAME, by_token=False)
    blocks = build(TritonBlockScaledExperts, SCHEMES["fp8-block"], (2, 16, 64)).weight
    with pytest.raises(KernelUnavailableError, match="not fp8-block128x128"):
        cls(blocks, None, InputContract(scheme.input))


def test_a_launch_is_given_codes(monkeypatch):
    """Of a raw activation once a token, however many experts read it."""
    cls, scheme = EVERY["fp8-dynamic"]
    both = build(cls, scheme, (4, 16, 64))
    seen: list[QuantizedActivation] = []
    multiply = cls.multiply

    def watched(self, x, pairs, *, by_token):
        seen.append(x)
        return multiply(self, x, pairs, by_token=by_token)

    monkeypatch.setattr(cls, "multiply", watched)
    pairs = routed("some", 4)
    both.kernel.apply(rows_for(pairs, 64, by_token=True), pairs, NAME, by_token=True)
    assert [x.codes.shape[0] for x in seen] == [5]
