"""The C matmul of bfloat16 weights: float32 sums by the definition, AMX with one of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from branchline.core import native, quantize
from branchline.core.errors import ContractError, KernelUnavailableError, RawConsumerError
from branchline.core.platform import Platform, detect_platform
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN
from branchline.linear.kernels import packed
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.kernels.float_selection import (
    FloatKernel,
    build_float_kernel,
    give_weight_back,
    select_float_kernel,
)
from branchline.linear.kernels.native_bf16 import FloatLinearConfig, NativeBf16Linear
from branchline.linear.kernels.packed import pack_halves, unpack_halves
from branchline.linear.kernels.reference import bfloat16_matmul

from .cases import NAME, activation, assert_same, bits

BF16 = torch.bfloat16
ISAS = ("scalar", "avx2", "avx512", "amx")
SHAPES = [(1, 64, 128), (2, 65, 1), (4, 7, 130), (5, 64, 257), (7, 1, 1000), (33, 700, 129),
          (300, 130, 77), (13, 128, 255), (1100, 66, 40)]  # fmt: skip
CONFIG = FloatLinearConfig(64, 32, BF16)


@pytest.fixture(autouse=True)
def _outputs_full_of_nan(monkeypatch):
    def full(shape, dtype, device):
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(packed, "empty", full)


@pytest.fixture(autouse=True)
def _best_isa_and_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    functions = native.load().functions
    functions.bl_set_isa(functions.bl_best_isa())


def each_isa():
    functions = native.load().functions
    for index in range(functions.bl_best_isa() + 1):
        functions.bl_set_isa(index)
        yield ISAS[index]


def linear(n: int, k: int, *, bias: bool = False) -> nn.Linear:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    module = nn.Linear(k, n, bias=bias, dtype=BF16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def of_weight(weight: torch.Tensor) -> NativeBf16Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=BF16)
    module.weight.data = weight
    return NativeBf16Linear(module, keeps_weight=True)


def every_encoding() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)


def defined(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, isa: str
) -> torch.Tensor:
    with torch.no_grad():
        return bfloat16_matmul(x, weight, bias, tiles=isa == "amx")


def flushed(values: torch.Tensor, isa: str) -> torch.Tensor:
    """Of AMX, which has no subnormals."""
    tiny = values.abs() < torch.finfo(torch.float32).tiny
    return torch.where(tiny, values * 0, values) if isa == "amx" else values


def same_numbers(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bytes where numbers, NaN where NaN; one zero is as good as the other."""
    assert torch.equal(got.isnan(), wanted.isnan())
    assert_same(got.nan_to_num(0.0, torch.inf, -torch.inf) + 0.0,
                wanted.nan_to_num(0.0, torch.inf, -torch.inf) + 0.0)  # fmt: skip


# --- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_within_a_float32_sum_and_one_rounding(m, n, k, bias):
    module = linear(n, k, bias=bias)
    x = activation(m, k)
    exact = x.double() @ module.weight.double().t()
    magnitudes = x.double().abs() @ module.weight.double().abs().t()
    if bias:
        exact, magnitudes = exact + module.bias.double(), magnitudes + module.bias.double().abs()
    # Blocks of 128 products, then as many block sums, each addition off by 2**-24 at most; AMX adds
    # fewer one after the other.
    additions = min(k, 128) + k // 128 + 2
    bound = magnitudes * additions * 2.0**-24
    bound = bound + (exact.abs() + bound) * 2.0**-8
    kernel = NativeBf16Linear(module, keeps_weight=True)
    for isa in each_isa():
        out = kernel.apply(x, NAME)
        assert bool(((out.double() - exact).abs() <= bound).all())
        assert_same(out, defined(x, module.weight, module.bias, isa))


@pytest.mark.parametrize("rows", [9, 20, 70])
def test_sums_begin_on_the_left_of_every_block(rows):
    for k in (300, 1100):
        x, module = activation(rows, k), linear(70, k)
        kernel = NativeBf16Linear(module, keeps_weight=True)
        for isa in each_isa():
            assert_same(kernel.apply(x, NAME), defined(x, module.weight, None, isa))


@pytest.mark.parametrize("rows", [1, 8])
def test_every_encoding_of_a_weight(rows):
    every = every_encoding()
    kernel = of_weight(every[:, None].clone())
    for factor in (1.0, -1.0, 2.0, 2.0**-100, 2.0**120, 2.0**-133, torch.inf, torch.nan):
        x = torch.full((rows, 1), factor, dtype=BF16)
        for isa in each_isa():
            product = flushed(every.double(), isa) * flushed(x[0].double(), isa)
            wanted = flushed(product.float(), isa).to(BF16).expand(rows, -1)
            same_numbers(kernel.apply(x, NAME), wanted)


@pytest.mark.parametrize("weight", [1.0, 0.5, -(2.0**127), 2.0**-120])
def test_every_encoding_of_an_input(weight):
    x = every_encoding()[:, None].clone()[::37]
    kernel = of_weight(torch.full((3, 1), weight, dtype=BF16))
    for rows in (x, x[:2]):
        for isa in each_isa():
            product = flushed(rows.double(), isa) * torch.tensor(weight, dtype=BF16).double()
            wanted = flushed(product.float(), isa).to(BF16).expand(-1, 3)
            same_numbers(kernel.apply(rows, NAME), wanted)


@pytest.mark.parametrize("rows", [2, 40])
def test_random_encodings_have_the_bytes_of_the_definition(rows):
    generator = torch.Generator().manual_seed(rows)

    def bits_of(*shape):
        return torch.randint(-32768, 32768, shape, generator=generator, dtype=torch.int16)

    x, weight = bits_of(rows, 5).view(BF16), bits_of(900, 5).view(BF16)
    # Products below the least float32, and sums of those with numbers at its edge.
    small = x.clone()
    small.view(torch.int16).bitwise_and_(0x83FF - 0x10000)
    for inputs in (x, small):
        for factor in (weight, weight * 2.0**-64):
            kernel, seen = of_weight(factor), {}
            for isa in each_isa():
                out = kernel.apply(inputs, NAME)
                same_numbers(out, defined(inputs, factor, None, isa))
                seen.setdefault(isa == "amx", out)
                assert_same(out, seen[isa == "amx"])


def test_large_terms_cancel_without_overflow():
    largest = torch.finfo(BF16).max
    x = torch.tensor([[largest, largest, 1.0]], dtype=BF16)
    kernel = of_weight(torch.tensor([[1.0, -1.0, 3.0], [1.0, 0.0, 0.0]], dtype=BF16))
    for isa in each_isa():
        # Tiles add the first and the third before the second; and a product that begins a sum is
        # rounded, as there is nothing to add it to.
        if isa == "amx":
            assert kernel.apply(x, NAME).tolist() == [[0.0, largest]]
            continue
        assert kernel.apply(x, NAME).tolist() == [[3.0, largest]]
        # The product alone is beyond float32, the sum is not.
        far = torch.tensor([[-(2.0**127), 2.0**64, 0.0]], dtype=BF16)
        beyond = of_weight(torch.tensor([[1.0, 2.0**64, 0.0]], dtype=BF16))
        assert beyond.apply(far, NAME).tolist() == [[2.0**127]]


# --- bytes do not depend on the batch --------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(700, 257), (64, 1000), (130, 33)])
def test_a_row_has_the_same_bytes_in_every_batch_and_on_any_threads(n, k):
    kernel = NativeBf16Linear(linear(n, k, bias=True), keeps_weight=False)
    x = activation(300, k)
    whole = kernel.apply(x, NAME)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 4, 5, 6, 7, 16, 64, 265, 300):
            assert_same(kernel.apply(x[:rows], NAME), whole[:rows])
            assert_same(kernel.apply(x[-rows:], NAME), whole[-rows:])


def test_a_neighbour_full_of_nan_changes_nothing():
    kernel = NativeBf16Linear(linear(70, 130), keeps_weight=False)
    x = activation(12, 130)
    wanted = kernel.apply(x, NAME)
    x[5] = torch.nan
    got = kernel.apply(x, NAME)
    assert bool(got[5].isnan().all())
    others = [i for i in range(12) if i != 5]
    assert_same(got[others], wanted[others])


@pytest.mark.parametrize("shape", [(96,), (2, 3, 96), (2, 0, 96), (0, 96)])
def test_shapes(shape):
    module = linear(65, 96, bias=True)
    kernel = NativeBf16Linear(module, keeps_weight=True)
    x = activation(*shape)
    out = kernel.apply(x, NAME)
    assert out.shape == module(x).shape
    assert_same(out.reshape(-1, 65), kernel.apply(x.reshape(-1, 96), NAME))


def test_strided_activations():
    kernel = NativeBf16Linear(linear(64, 96), keeps_weight=False)
    for view in (lambda x: x[:, ::2], lambda x: x[:, 1], lambda x: x.transpose(0, 1)):
        x = view(activation(6, 4, 96))
        assert_same(kernel.apply(x, NAME), kernel.apply(x.contiguous(), NAME))


# --- the module's weight ---------------------------------------------------------------------


def test_panels_come_back_to_the_bit():
    for n, k in ((1, 1), (63, 5), (64, 64), (200, 130)):
        weight = torch.randint(-32768, 32768, (n, k), dtype=torch.int16).view(BF16)
        back = unpack_halves(pack_halves(weight), n, k)
        assert back.is_contiguous()
        assert_same(bits(back), bits(weight))


@pytest.mark.parametrize("make", [lambda: linear(70, 33, bias=True), lambda: Conv1D(70, 33)])
def test_the_weight_is_taken_and_comes_back_to_the_bit(make):
    module = make().to(BF16)
    with torch.no_grad():
        pattern = torch.randint(-32768, 32768, module.weight.shape, dtype=torch.int16)
        module.weight.view(torch.int16).copy_(pattern)
    parameter, before, bias = module.weight, module.weight.detach().clone(), module.bias
    by_rows = before.t() if isinstance(module, Conv1D) else before
    kernel = NativeBf16Linear(module, keeps_weight=False)
    assert parameter.untyped_storage().nbytes() == 0
    assert kernel.weight_bytes == 128 * 34 * 2
    assert (kernel.out_features, kernel.in_features) == (70, 33)
    assert_same(bits(kernel.float_weight()), bits(before))
    assert_same(bits(kernel.unpacked()), bits(by_rows))
    assert_same(kernel.dequantized().nan_to_num(7.0), by_rows.float().nan_to_num(7.0))
    assert kernel.bias() is bias
    for _ in range(2):
        give_weight_back(kernel)
        assert module.weight is parameter
        assert parameter.stride() == before.stride()
        assert_same(bits(parameter.detach()), bits(before))
    assert kernel.float_weight() is parameter


def test_a_conv1d_is_multiplied_as_its_module_does():
    module = Conv1D(70, 33).to(BF16)
    nn.init.normal_(module.bias)
    x = activation(3, 33)
    exact = x.double() @ module.weight.double() + module.bias.double()
    got = NativeBf16Linear(module, keeps_weight=False).apply(x, NAME)
    assert (got.double() - exact).abs().max() <= exact.abs().max() * 2.0**-8


def test_a_kept_weight_stays_and_counts_twice():
    module = linear(64, 32)
    before = module.weight.detach().clone()
    kernel = NativeBf16Linear(module, keeps_weight=True)
    assert_same(module.weight.detach(), before)
    assert kernel.float_weight() is module.weight
    assert kernel.weight_bytes == 2 * 64 * 32 * 2
    # One whose rows overlap cannot be given back as it lay.
    module = linear(64, 32)
    module.weight.data = torch.ones(1, 32, dtype=BF16).expand(64, 32)
    NativeBf16Linear(module, keeps_weight=False)
    assert module.weight.shape == (64, 32)


# --- refusals and the choice -----------------------------------------------------------------


def test_inputs_that_are_not_its_own_are_refused_by_the_layer():
    kernel = NativeBf16Linear(linear(8, 16), keeps_weight=False)
    for x in (torch.ones(2, 16), torch.ones(2, 16, dtype=torch.int64), activation(2, 17)):
        with pytest.raises(ContractError, match=r"down_proj.*16 columns"):
            kernel.apply(x, NAME)
    with pytest.raises(RawConsumerError, match="down_proj"):
        kernel.apply(quantize(activation(2, 16), FP8_DYNAMIC_TOKEN), NAME)
    with pytest.raises(RawConsumerError, match="down_proj"):
        kernel.apply(torch.zeros(2, 16).to(torch.float8_e4m3fn), NAME)


def platform(**facts) -> Platform:
    here = detect_platform()
    return dataclasses.replace(here, native_isa="avx2", native_reason="", **facts)


REFUSED = [
    (CONFIG, platform(device_type="cuda"), "run on a CPU"),
    (CONFIG, dataclasses.replace(platform(), native_isa=None, native_reason="not built"),
     "absent: not built"),
    (dataclasses.replace(CONFIG, dtype=torch.float16), platform(), "the weight is float16"),
    (dataclasses.replace(CONFIG, weight_read=True), platform(), "reads the weight itself"),
    (dataclasses.replace(CONFIG, in_features=0), platform(), "no columns"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "where", "reason"), REFUSED, ids=[r for _, _, r in REFUSED])
def test_auto_passes_it_over_with_the_reason_and_native_raises(config, where, reason):
    chosen = select_float_kernel(config, where, FloatKernel.AUTO)
    assert chosen.kernel is FloatLinear
    ((name, why),) = chosen.rejected
    assert name == "native-bf16"
    assert reason in why
    with pytest.raises(KernelUnavailableError, match=rf"lm_head.*{reason}.*float_kernel='auto'"):
        select_float_kernel(config, where, FloatKernel.NATIVE, "lm_head")


def test_it_is_chosen_only_where_asked_for():
    for choice in (FloatKernel.AUTO, FloatKernel.NATIVE):
        chosen = select_float_kernel(CONFIG, platform(), choice)
        assert (chosen.kernel, chosen.rejected) == (NativeBf16Linear, ())
    assert select_float_kernel(CONFIG, platform(), FloatKernel.TORCH).kernel is FloatLinear


def test_a_built_kernel_knows_what_was_passed_over():
    def build(module, choice):
        return build_float_kernel(
            NAME, module, platform(), choice, weight_read=False, keeps_weight=False
        )

    float32 = build(nn.Linear(4, 4), FloatKernel.AUTO)
    assert isinstance(float32, FloatLinear)
    assert [r.name for r in float32.rejected] == ["native-bf16"]
    assert isinstance(build(linear(4, 4), FloatKernel.NATIVE), NativeBf16Linear)
    assert build(linear(4, 4), FloatKernel.TORCH).rejected == ()
    with pytest.raises(KernelUnavailableError, match="the weight is float32"):
        NativeBf16Linear(nn.Linear(4, 4), keeps_weight=False)
