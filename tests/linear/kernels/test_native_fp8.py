"""The C matmul: equal to the definition bit for bit, on every instruction set and row count."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from branchline.core import native
from branchline.core.errors import (
    ConfigError,
    ContractError,
    KernelUnavailableError,
    RawConsumerError,
    ScaleError,
)
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN
from branchline.core.scheme import BLOCK_128, PER_CHANNEL, SCHEMES, LinearScheme, WeightScheme
from branchline.linear.contract import InputContract
from branchline.linear.kernels import packed
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.kernels.native_fp8 import (
    NativeFp8Linear,
    NativeW8A16Linear,
    group_siblings,
)
from branchline.linear.kernels.packed import pack_codes, unpack_codes
from branchline.linear.kernels.reference import matmul
from branchline.linear.quantized_weight import QuantizedWeight

from .cases import BLOCKS, NAME, ROWWISE, activation, assert_same, bits, codes_for, pair

ISAS = ("scalar", "avx2", "avx512", "amx")
MIXED = {
    "channel-group128": LinearScheme(PER_CHANNEL, SCHEMES["fp8-block"].input),
    "block-token": LinearScheme(BLOCK_128, FP8_DYNAMIC_TOKEN),
    "block-static": LinearScheme(BLOCK_128, SCHEMES["fp8-static"].input),
    "block64x128": LinearScheme(WeightScheme(64, 128), SCHEMES["fp8-block"].input),
}
SERVED = {**ROWWISE, **BLOCKS, "mxfp8": SCHEMES["mxfp8"], **MIXED}


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set that this processor has."""
    functions = native.load().functions
    if functions.bl_set_isa(ISAS.index(request.param)):
        # Not a skip: the narrower ones are there everywhere, and CI's machine has them all.
        assert ISAS.index(request.param) > functions.bl_best_isa()
        request.param = ISAS[functions.bl_best_isa()]
    yield request.param
    functions.bl_set_isa(functions.bl_best_isa())


@pytest.fixture(autouse=True)
def _outputs_full_of_nan(monkeypatch):
    def full(shape, dtype, device):
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(packed, "empty", full)


@pytest.mark.parametrize("scheme", SERVED.values(), ids=SERVED)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 64, 128), (3, 192, 64), (4, 70, 130), (5, 64, 257), (7, 1, 1), (17, 130, 576), (0, 9, 9)],
)
def test_equal_to_the_definition(isa, scheme, m, n, k):
    made = pair(NativeFp8Linear, scheme, n, k, torch.bfloat16 if m % 2 else None)
    x = activation(m, k)
    codes = codes_for(x, made.kernel)
    wanted = matmul(codes, made.weight, made.kernel.bias(), tiles=isa == "amx")
    assert_same(made.kernel.apply(codes, NAME), wanted)
    assert_same(made.kernel.apply(x, NAME), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(192,), (2, 3, 192), (2, 0, 192)])
def test_shapes_and_dtypes(dtype, shape):
    made = pair(NativeFp8Linear, SCHEMES["fp8-dynamic"], 576, 192, torch.bfloat16)
    x = activation(*shape, dtype=dtype)
    codes = codes_for(x, made.kernel)
    tiles = native.load().isa == "amx"
    wanted = matmul(codes, made.weight, made.kernel.bias(), tiles=tiles)
    assert_same(made.kernel.apply(x, NAME), wanted)


@pytest.mark.parametrize("name", ["fp8-dynamic", "fp8-block", "mxfp8"])
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (1368, 192), (3420, 576), (64, 3420)])
def test_a_row_has_the_same_bytes_in_every_batch(isa, name, n, k):
    made = pair(NativeFp8Linear, SCHEMES[name], n, k)
    x = activation(300, k)
    whole = made.kernel.apply(x, NAME)
    expected = made.emulated.apply(x, NAME).float()
    error = (whole.float() - expected).abs().amax() / expected.abs().amax()
    assert error < 2**-7
    for rows in (1, 2, 4, 5, 6, 11, 16, 64, 299):
        assert_same(made.kernel.apply(x[:rows], NAME), whole[:rows])
        assert_same(made.kernel.apply(x[-rows:], NAME), whole[-rows:])


@pytest.mark.parametrize("name", ["fp8-dynamic", "fp8-block", "mxfp8", "fp8-static"])
@pytest.mark.parametrize(("n", "k"), [(200, 290), (64, 608)])
def test_a_row_has_the_same_bytes_for_any_number_of_rows(isa, name, n, k):
    made = pair(NativeFp8Linear, SCHEMES[name], n, k, torch.bfloat16)
    x = activation(70, k)
    codes = codes_for(x, made.kernel)
    wanted = matmul(codes, made.weight, made.kernel.bias(), tiles=isa == "amx")
    before = torch.get_num_threads()
    try:
        for rows in range(1, 71):
            torch.set_num_threads(1 + rows % 2)
            assert_same(made.kernel.apply(x[:rows], NAME), wanted[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("m", [513, 1030])
def test_more_rows_than_are_decoded_at_once(isa, m):
    made = pair(NativeFp8Linear, SCHEMES["fp8-block"], 70, 1312)
    x = activation(m, 1312)
    whole = made.kernel.apply(x, NAME)
    for first in (0, 255, 510, m - 9):
        part = slice(first, first + 9)
        assert_same(made.kernel.apply(x[part], NAME), whole[part])


def test_threads_do_not_show():
    made = pair(NativeFp8Linear, SCHEMES["fp8-block"], 1000, 576)
    x = activation(33, 576)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(made.kernel.apply(x, NAME))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same(other, results[0])


def test_strided_codes_and_activations():
    made = pair(NativeFp8Linear, SCHEMES["fp8-dynamic"], 64, 96)
    for view in (lambda x: x[:, ::2], lambda x: x[:, 1], lambda x: x.transpose(0, 1)):
        x = view(activation(6, 4, 96))
        assert_same(made.kernel.apply(x, NAME), made.kernel.apply(x.contiguous(), NAME))
        weight_only = NativeW8A16Linear(made.weight, None, InputContract(None))
        assert_same(weight_only.apply(x, NAME), weight_only.apply(x.contiguous(), NAME))


def test_every_code_of_a_weight_and_of_an_input(isa):
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[(every & 0x7F) != 0x7F]
    weight = QuantizedWeight(
        numbers.view(torch.float8_e4m3fn)[:, None].contiguous(),
        torch.ones(254, 1),
        PER_CHANNEL,
        1,
    ).check(NAME)
    kernel = NativeFp8Linear(weight, None, InputContract(FP8_DYNAMIC_TOKEN))
    codes = codes_for(torch.ones(256, 1, dtype=torch.float32), kernel)
    codes = dataclasses.replace(
        codes, data=every.view(torch.float8_e4m3fn)[:, None].contiguous(), scale=torch.ones(256, 1)
    )
    got = kernel.multiply(codes)
    assert_same(
        got.nan_to_num(777.0), matmul(codes, weight, None, tiles=isa == "amx").nan_to_num(777.0)
    )
    assert bool(got[[0x7F, 0xFF]].isnan().all())
    assert torch.equal(got[0x38], numbers.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [SCHEMES["fp8-dynamic"], SCHEMES["fp8-block"]], ids=str)
@pytest.mark.parametrize("m", [1, 6, 65])
def test_weight_only_equals_the_definition(isa, dtype, scheme, m):
    generator = torch.Generator().manual_seed(m)
    weight = QuantizedWeight.from_float(
        torch.randn(130, 300, generator=generator), NAME, scheme.weight
    )
    bias = torch.randn(130, generator=generator)
    kernel = NativeW8A16Linear(weight, bias, InputContract(None))
    x = activation(m, 300, dtype=dtype)
    assert_same(kernel.apply(x, NAME), matmul(x, weight, bias))
    with pytest.raises(RawConsumerError):
        kernel.apply(codes_for(x, pair(NativeFp8Linear, scheme, 130, 300).kernel), NAME)


def test_weights_come_back_to_the_bit():
    for n, k in ((1, 1), (63, 5), (64, 64), (200, 130)):
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert_same(bits(unpack_codes(pack_codes(codes), n)), bits(codes))
    for scheme in SERVED.values():
        made = pair(NativeFp8Linear, scheme, 130, 200)
        back = made.kernel.quantized_weight()
        assert_same(bits(back.codes), bits(made.weight.codes))
        assert_same(bits(back.scale), bits(made.weight.scale))
        assert back.scheme == made.weight.scheme


def test_weights_take_a_quarter_of_float32():
    kernel = pair(NativeFp8Linear, SCHEMES["fp8-dynamic"], 512, 2048).kernel
    assert kernel.weight_bytes < 512 * 2048 * 1.02
    # What came in may go: no view of it is left, which would keep all of it.
    held = [v for v in vars(kernel._packed._source).values() if isinstance(v, torch.Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) < 512 * 2048 * 0.01


def test_what_it_cannot_do_is_refused_with_the_reason():
    nvfp4 = LinearConfig(64, 64, SCHEMES["nvfp4"])
    assert "decodes FP8 weights" in NativeFp8Linear.can_implement(nvfp4).reason
    odd = LinearScheme(WeightScheme(96, 128), FP8_DYNAMIC_TOKEN)
    assert "multiples of 64" in NativeFp8Linear.can_implement(LinearConfig(64, 64, odd)).reason
    narrow = LinearScheme(WeightScheme(128, 48), FP8_DYNAMIC_TOKEN)
    assert "48 columns" in NativeFp8Linear.can_implement(LinearConfig(64, 64, narrow)).reason
    weight = QuantizedWeight.from_float(torch.randn(4, 8), NAME)
    with pytest.raises(KernelUnavailableError, match="stays unquantised"):
        NativeFp8Linear(weight, None, InputContract(None))
    kernel = NativeFp8Linear(weight, None, InputContract(FP8_DYNAMIC_TOKEN))
    with pytest.raises(ContractError, match="takes 8 columns"):
        kernel.apply(torch.ones(2, 9, dtype=torch.bfloat16), NAME)


# --- siblings ------------------------------------------------------------------------------------


def counted_calls(monkeypatch) -> list[int]:
    """How many weights each call of the C matmul takes."""
    calls: list[int] = []
    call = native.NativeLibrary.call

    def counting(self, name, *arguments):
        if name == "bl_matmul":
            calls.append(arguments[1])
        return call(self, name, *arguments)

    monkeypatch.setattr(native.NativeLibrary, "call", counting)
    return calls


def test_siblings_are_one_call_and_change_no_byte(monkeypatch):
    kernels = [pair(NativeFp8Linear, SCHEMES["fp8-dynamic"], n, 192).kernel for n in (192, 64, 70)]
    x = activation(3, 192)
    alone = [kernel.apply(x, NAME) for kernel in kernels]
    group_siblings(kernels)
    calls = counted_calls(monkeypatch)
    shared = codes_for(x, kernels[0]).shared()
    for kernel, expected in zip(kernels, alone, strict=True):
        assert_same(kernel.apply(shared, NAME), expected)
    assert calls == [3]
    # A second reading of the same object, in another order.
    for kernel, expected in zip(reversed(kernels), reversed(alone), strict=True):
        assert_same(kernel.apply(shared, NAME), expected)
    assert calls == [3, 3]


def test_nobody_computes_for_siblings_that_read_another_object(monkeypatch):
    kernels = [pair(NativeFp8Linear, SCHEMES["fp8-dynamic"], n, 64).kernel for n in (64, 128)]
    group_siblings(kernels)
    calls = counted_calls(monkeypatch)
    for kernel in kernels:
        kernel.apply(codes_for(activation(3, 64), kernel), NAME)
    assert calls == [1, 1]


def test_only_takers_of_the_same_codes_are_siblings():
    token = [pair(NativeFp8Linear, SCHEMES["fp8-dynamic"], 64, 64).kernel for _ in range(2)]
    block = pair(NativeFp8Linear, SCHEMES["fp8-block"], 64, 64).kernel
    emulated = pair(NativeFp8Linear, SCHEMES["fp8-dynamic"], 64, 64).emulated
    group_siblings([token[0], block, token[1], emulated])
    assert token[0].group == token[1].group == tuple(token)
    assert block.group == (block,)
    many = [pair(NativeFp8Linear, SCHEMES["fp8-dynamic"], 64, 64).kernel for _ in range(11)]
    group_siblings(many)
    assert len(many[0].group) == native.MATMULS
    assert many[-1].group == (many[-1],)


def test_weights_that_do_not_fit_together_are_refused():
    weight = QuantizedWeight.from_float(torch.randn(5, 8), NAME)
    contract = InputContract(FP8_DYNAMIC_TOKEN)
    for bias in (torch.zeros(3), torch.zeros(64), torch.zeros(5, 1)):
        with pytest.raises(ContractError, match="bias has shape"):
            NativeFp8Linear(weight, bias, contract)
    for changed in (
        dataclasses.replace(weight, in_features=300),
        dataclasses.replace(weight, scale=torch.ones(3, 1)),
    ):
        with pytest.raises(ScaleError, match="shape"):
            NativeFp8Linear(changed, None, contract)
    empty = QuantizedWeight.from_float(torch.empty(5, 0), NAME)
    with pytest.raises(KernelUnavailableError, match="no columns"):
        NativeFp8Linear(empty, None, contract)
    with pytest.raises(ConfigError, match="no block"):
        WeightScheme(64, 0)
    kernel = NativeW8A16Linear(weight, None, InputContract(None))
    with pytest.raises(ContractError, match="floating-point"):
        kernel.apply(torch.ones(2, 8, dtype=torch.int64), NAME)
