"""The C kernels of experts: each pair has the bytes of the linear's kernel on its row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from branchline.core import native
from branchline.core.errors import (
    ContractError,
    KernelUnavailableError,
    QuantKeyMismatchError,
    RawConsumerError,
)
from branchline.core.platform import detect_platform
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN
from branchline.core.scheme import BLOCK_128, PER_CHANNEL, SCHEMES, LinearScheme, WeightScheme
from branchline.linear.contract import InputContract
from branchline.linear.experts.kernels import packed
from branchline.linear.experts.kernels.base import GroupedConfig
from branchline.linear.experts.kernels.native_fp8 import NativeFp8Experts, NativeW8A16Experts
from branchline.linear.experts.kernels.selection import select_grouped_kernel
from branchline.linear.experts.pairs import Pairs
from branchline.linear.experts.weight import ExpertsWeight
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.kernels.native_fp8 import NativeFp8Linear, NativeW8A16Linear
from branchline.linear.kernels.reference import matmul
from tests.linear.kernels.cases import BLOCKS, ROWWISE, assert_same, bits

from .grouped import NAME, ROUTINGS, assert_close, build, codes_for, random_pairs, routed, rows_for

ISAS = ("scalar", "avx2", "avx512", "amx")
SERVED = {
    **ROWWISE,
    **BLOCKS,
    "mxfp8": SCHEMES["mxfp8"],
    "channel-group128": LinearScheme(PER_CHANNEL, SCHEMES["fp8-block"].input),
    "block-token": LinearScheme(BLOCK_128, FP8_DYNAMIC_TOKEN),
    "block64x128": LinearScheme(WeightScheme(64, 128), SCHEMES["fp8-block"].input),
}
FEW = {name: SERVED[name] for name in ("fp8-static", "fp8-dynamic", "fp8-block", "mxfp8")}
BLOCK = SCHEMES["fp8-block"]


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set that this processor has."""
    functions = native.load().functions
    if functions.bl_set_isa(ISAS.index(request.param)):
        # Not a skip: the narrower ones are there everywhere.
        assert ISAS.index(request.param) > functions.bl_best_isa()
        request.param = ISAS[functions.bl_best_isa()]
    yield request.param
    functions.bl_set_isa(functions.bl_best_isa())


@pytest.fixture(autouse=True)
def _outputs_full_of_nan(monkeypatch):
    def full(shape, dtype, device):
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(packed, "empty", full)


def by_rows(kernel, weight: ExpertsWeight, x: torch.Tensor, pairs: Pairs, *, by_token: bool):
    """The linear's kernel on one row at a time; NaN for pairs of nobody."""
    linear = NativeFp8Linear if kernel.contract.key is not None else NativeW8A16Linear
    bias = kernel.bias()
    linears = [
        linear(own, None if bias is None else bias[number], kernel.contract)
        for number, own in enumerate(weight.experts)
    ]
    out = torch.full((len(pairs), weight.out_features), float("nan"), dtype=x.dtype)
    for position, expert in enumerate(pairs.expert.tolist()):
        if expert < pairs.experts:
            row = int(pairs.token[position]) if by_token else position
            out[position] = linears[expert].apply(x[row : row + 1], NAME)[0]
    return out


def assert_same_with_nan(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), wanted.isnan())
    assert_same(got.nan_to_num(777.0), wanted.nan_to_num(777.0))


# --- equal to the linear's kernel -------------------------------------------------------------


@pytest.mark.parametrize("scheme", SERVED.values(), ids=SERVED)
@pytest.mark.parametrize(("n", "k"), [(192, 128), (70, 300), (130, 257), (1, 1)])
def test_every_scheme(scheme, n, k):
    made = build(NativeFp8Experts, scheme, (4, n, k), bias=n % 4 == 2)
    pairs = routed("some", 4)
    for by_token in (True, False):
        x = rows_for(pairs, k, by_token=by_token)
        out = made.kernel.apply(x, pairs, NAME, by_token=by_token)
        assert_same(out, by_rows(made.kernel, made.weight, x, pairs, by_token=by_token))
        assert_close(made, x, pairs, out, by_token=by_token)
        codes = codes_for(x, made.kernel)
        assert_same(made.kernel.apply(codes, pairs, NAME, by_token=by_token), out)


@pytest.mark.parametrize("scheme", FEW.values(), ids=FEW)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_instruction_set(isa, scheme, routing):
    made = build(NativeFp8Experts, scheme, (8, 136, 160), bias=True)
    for partial in (False, True):
        pairs = Pairs.of(torch.tensor(ROUTINGS[routing]) + partial, 8, partial=partial)
        for by_token in (True, False):
            x = rows_for(pairs, 160, by_token=by_token)
            out = made.kernel.apply(x, pairs, NAME, by_token=by_token)
            wanted = by_rows(made.kernel, made.weight, x, pairs, by_token=by_token)
            assert_same_with_nan(out, wanted)


def test_equal_to_the_definition(isa):
    """Not by way of the linear's kernel, which shares its code."""
    made = build(NativeFp8Experts, BLOCK, (3, 70, 260), bias=True)
    pairs = random_pairs(5, 2, 3)
    x = rows_for(pairs, 260, by_token=True)
    out = made.kernel.apply(x, pairs, NAME, by_token=True)
    for position, expert in enumerate(pairs.expert.tolist()):
        codes = codes_for(x[pairs.token[position]][None], made.kernel)
        weight, bias = made.weight.experts[expert], made.kernel.bias()[expert]
        wanted = matmul(codes, weight, bias, tiles=isa == "amx")
        assert_same(out[position], wanted[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", [SCHEMES["fp8-dynamic"], BLOCK], ids=str)
def test_weight_only(isa, dtype, scheme):
    weight = ExpertsWeight.from_float(torch.randn(4, 70, 130), NAME, scheme.weight)
    kernel = NativeW8A16Experts(weight, torch.randn(4, 70), InputContract(None))
    pairs = random_pairs(9, 2, 4)
    for by_token in (True, False):
        x = rows_for(pairs, 130, by_token=by_token, dtype=dtype)
        out = kernel.apply(x, pairs, NAME, by_token=by_token)
        assert_same(out, by_rows(kernel, weight, x, pairs, by_token=by_token))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    made = build(NativeFp8Experts, BLOCK, (4, 70, 130))
    pairs = random_pairs(9, 2, 4)
    x = rows_for(pairs, 130, by_token=True, dtype=dtype)
    out = made.kernel.apply(x, pairs, NAME, by_token=True)
    assert_same(out, by_rows(made.kernel, made.weight, x, pairs, by_token=True))


# --- nothing else shows -----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", FEW.values(), ids=FEW)
def test_a_pair_has_the_same_bytes_among_any_others(isa, scheme):
    """Subsets and repetitions of 300 tokens; one expert has most of them, and more than a chunk."""
    generator = torch.Generator().manual_seed(3)
    made = build(NativeFp8Experts, scheme, (4, 72, 192))
    index = torch.rand(300, 4, generator=generator).topk(2).indices
    index[:270, 0] = 1
    index[:270, 1] = torch.where(index[:270, 1] == 1, 3, index[:270, 1])
    pairs = Pairs.of(index, 4)
    x = torch.randn(300, 192, generator=generator).bfloat16()
    whole = made.kernel.apply(x, pairs, NAME, by_token=True)[pairs.position].view(300, 2, -1)
    for count in (1, 2, 5, 17, 150):
        chosen = torch.randint(0, 300, (count,), generator=generator)
        some = Pairs.of(index[chosen], 4)
        out = made.kernel.apply(x[chosen], some, NAME, by_token=True)
        assert_same(out[some.position].view(count, 2, -1), whole[chosen])
        rows = x[chosen][some.token]
        assert_same(made.kernel.apply(rows, some, NAME, by_token=False), out)


def test_threads_do_not_show(monkeypatch):
    made = build(NativeFp8Experts, BLOCK, (4, 520, 384), bias=True)
    pairs = random_pairs(40, 2, 4)
    x = rows_for(pairs, 384, by_token=True)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(native, "threads", lambda count=threads: count)
        results.append(made.kernel.apply(x, pairs, NAME, by_token=True))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_strided_rows():
    made = build(NativeFp8Experts, BLOCK, (4, 64, 96))
    weight_only = NativeW8A16Experts(made.weight, None, InputContract(None))
    pairs = random_pairs(6, 2, 4)
    x = rows_for(pairs, 192, by_token=True)
    for view in (x[:, ::2], x[:, 50:146]):
        for kernel in (made.kernel, weight_only):
            assert_same(
                kernel.apply(view, pairs, NAME, by_token=True),
                kernel.apply(view.contiguous(), pairs, NAME, by_token=True),
            )


@pytest.mark.parametrize("top_k", [1, 2])
def test_no_tokens(isa, top_k):
    made = build(NativeFp8Experts, BLOCK, (3, 70, 130))
    pairs = Pairs.of(torch.empty((0, top_k), dtype=torch.int64), 3)
    for by_token in (True, False):
        x = torch.empty((0, 130), dtype=torch.bfloat16)
        assert made.kernel.apply(x, pairs, NAME, by_token=by_token).shape == (0, 70)


def test_one_expert():
    made = build(NativeFp8Experts, BLOCK, (1, 70, 130), bias=True)
    pairs = Pairs.of(torch.zeros((7, 1), dtype=torch.int64), 1)
    x = rows_for(pairs, 130, by_token=True)
    out = made.kernel.apply(x, pairs, NAME, by_token=True)
    (weight,) = made.weight.experts
    linear = NativeFp8Linear(weight, made.kernel.bias()[0], made.kernel.contract)
    assert_same(out, linear.apply(x, NAME))


def test_what_nobody_computes_is_not_written():
    made = build(NativeFp8Experts, BLOCK, (3, 70, 130))
    pairs = Pairs.of(torch.tensor([[-1, 5], [3, 100]]), 3, partial=True)
    x = rows_for(pairs, 130, by_token=True)
    assert bool(made.kernel.apply(x, pairs, NAME, by_token=True).isnan().all())


# --- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SERVED.values(), ids=SERVED)
def test_weights_come_back_to_the_bit(scheme):
    made = build(NativeFp8Experts, scheme, (3, 130, 200))
    back = made.kernel.quantized_weight()
    assert len(back) == 3
    for own, wanted in zip(back.experts, made.weight.experts, strict=True):
        assert own.scheme == wanted.scheme
        assert own.in_features == wanted.in_features
        assert_same(bits(own.codes), bits(wanted.codes))
        assert own.scale.dtype == wanted.scale.dtype
        assert_same(bits(own.scale), bits(wanted.scale))
    assert_same(made.kernel.dequantized(), made.weight.dequantize())


def test_weights_take_a_quarter_of_float32():
    kernel = build(NativeFp8Experts, SCHEMES["fp8-dynamic"], (4, 256, 512)).kernel
    assert kernel.weight_bytes < 4 * 256 * 512 * 1.02
    held = [
        value
        for source in kernel._packed._sources
        for value in vars(source).values()
        if isinstance(value, torch.Tensor)
    ]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) < 4 * 256 * 512 * 0.02


def test_every_expert_has_its_own_scale():
    values = torch.randn(3, 64, 128) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    for scheme in FEW.values():
        made = build(NativeFp8Experts, scheme, (3, 64, 128), values=values)
        pairs = Pairs.of(torch.tensor([[0, 1], [2, 1], [2, 0]]), 3)
        x = rows_for(pairs, 128, by_token=True)
        out = made.kernel.apply(x, pairs, NAME, by_token=True)
        assert_same(out, by_rows(made.kernel, made.weight, x, pairs, by_token=True))


# --- choice and refusals ----------------------------------------------------------------------


def test_the_cpu_chooses_them():
    platform = detect_platform("cpu")
    linear = LinearConfig(256, 128, BLOCK)
    assert select_grouped_kernel(GroupedConfig(4, linear), platform).kernel is NativeFp8Experts
    weight_only = LinearConfig(256, 128, LinearScheme(BLOCK_128, None))
    chosen = select_grouped_kernel(GroupedConfig(4, weight_only), platform)
    assert chosen.kernel is NativeW8A16Experts
    without = dataclasses.replace(platform, native_isa=None, native_reason="switched off")
    chosen = select_grouped_kernel(GroupedConfig(4, linear), without)
    assert chosen.kernel.name == "emulated"
    reasons = {rejection.name: rejection.reason for rejection in chosen.rejected}
    assert "switched off" in reasons["native-fp8"]


def test_what_it_cannot_do_is_refused():
    nvfp4 = GroupedConfig(2, LinearConfig(64, 64, SCHEMES["nvfp4"]))
    assert "decodes FP8 weights" in NativeFp8Experts.can_implement(nvfp4).reason
    weight = ExpertsWeight.from_float(torch.randn(3, 5, 8), NAME)
    contract = InputContract(FP8_DYNAMIC_TOKEN)
    for bias in (torch.zeros(5), torch.zeros(3, 64), torch.zeros(2, 5)):
        with pytest.raises(ContractError, match="bias has shape"):
            NativeFp8Experts(weight, bias, contract)
    with pytest.raises(KernelUnavailableError, match="stays unquantised"):
        NativeFp8Experts(weight, None, InputContract(None))
    empty = ExpertsWeight.from_float(torch.empty(3, 5, 0), NAME)
    with pytest.raises(KernelUnavailableError, match="no columns"):
        NativeFp8Experts(empty, None, contract)


def test_wrong_inputs_are_refused():
    made = build(NativeFp8Experts, SCHEMES["fp8-dynamic"], (3, 5, 8))
    weight_only = NativeW8A16Experts(made.weight, None, InputContract(None))
    pairs = random_pairs(4, 2, 3)
    x = rows_for(pairs, 8, by_token=True)
    for kernel in (made.kernel, weight_only):
        for wrong in (x[:, :7], x[:3], x[None], rows_for(pairs, 8, by_token=False)):
            with pytest.raises(ContractError, match="takes rows of shape"):
                kernel.apply(wrong, pairs, NAME, by_token=True)
        # The C code would read beyond its weights.
        with pytest.raises(ContractError, match="3 experts"):
            kernel.apply(x, random_pairs(4, 2, 5), NAME, by_token=True)
    other = codes_for(x, build(NativeFp8Experts, BLOCK, (3, 5, 8)).kernel)
    with pytest.raises(QuantKeyMismatchError):
        made.kernel.apply(other, pairs, NAME, by_token=True)
    with pytest.raises(RawConsumerError):
        weight_only.apply(codes_for(x, made.kernel), pairs, NAME, by_token=True)
    with pytest.raises(ContractError, match="floating-point"):
        weight_only.apply(torch.ones(4, 8, dtype=torch.int64), pairs, NAME, by_token=True)
