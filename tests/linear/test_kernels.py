from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers.pytorch_utils import Conv1D

from branchline.core import native
from branchline.core.errors import (
    ConfigError,
    ContractError,
    QuantKeyMismatchError,
    RawConsumerError,
    ScaleError,
)
from branchline.core.oracle import quantize
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
)
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.quantized_weight import QuantizedWeight, code_values
from branchline.linear.quantizers import quantize_input
from branchline.linear.weights import (
    float_weight,
    linear_refusal,
    linear_shape,
)

NAME = "layers.0.down_proj"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KEYS = [FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN]


def contract(key=FP8_STATIC_TENSOR, scale: float = 0.0173) -> InputContract:
    if key == FP8_STATIC_TENSOR:
        return InputContract(key, InputScale.checked(scale, NAME))
    return InputContract(key)


def kernel(key=FP8_STATIC_TENSOR, n: int = 7, k: int = 13, bias: bool = False):
    generator = torch.Generator().manual_seed(n * 1000 + k)
    weight = QuantizedWeight.from_float(torch.randn(n, k, generator=generator), NAME)
    b = torch.randn(n, generator=generator).bfloat16() if bias else None
    return EmulatedLinear(weight, b, contract(key)), weight, b


def activation(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def codes_for(x: torch.Tensor, of: InputContract):
    scale = of.scale.value if of.scale else None
    return quantize(x, of.key, static_scale=scale, producer="test producer")


@pytest.fixture(params=["native", "eager"])
def library(request, monkeypatch):
    """With the C kernels where they are built, and without."""
    if request.param == "eager":
        absent = native.NativeLibrary("", "switched off by the test", None)
        monkeypatch.setattr(native, "load", lambda: absent)
    return request.param


# --- emulated fp8 ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 13), (2, 3, 13), (0, 13), (2, 0, 13), (1, 13), (13,)])
def test_codes_and_plain_input_give_the_same_bytes(library, key, dtype, shape):
    linear, _, _ = kernel(key, bias=True)
    x = activation(*shape, dtype=dtype)
    out = linear.apply(x, NAME)
    assert out.shape == (*shape[:-1], 7)
    assert out.dtype == dtype
    assert torch.equal(out, linear.apply(codes_for(x, linear.contract), NAME))


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 1), (1, 129), (33, 127), (64, 128)])
def test_odd_sizes(library, key, n, k):
    linear, _, _ = kernel(key, n, k)
    assert (linear.out_features, linear.in_features) == (n, k)
    x = activation(4, k)
    assert torch.equal(linear.apply(x, NAME), linear.apply(codes_for(x, linear.contract), NAME))


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2, ::3],
        lambda x: x.transpose(0, 1)[..., :13],
        lambda x: x[..., 5:18],
        lambda x: x[:1, :, :13].expand(4, -1, -1),
        lambda x: x[0, :, :13].t()[:9].t().repeat(1, 2)[:, :13],
    ],
    ids=["steps", "transposed", "offset", "expanded", "mixed"],
)
def test_strided_input_gives_the_bytes_of_a_copy(library, key, view):
    x = view(activation(4, 6, 39))
    linear, _, _ = kernel(key)
    copy = x.contiguous()
    assert torch.equal(linear.apply(x, NAME), linear.apply(copy, NAME))
    assert torch.equal(linear.apply(codes_for(x, linear.contract), NAME), linear.apply(copy, NAME))


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_against_a_dequantised_float_matmul(library, key, bias):
    linear, weight, b = kernel(key, 33, 65, bias)
    x = activation(6, 65)
    quantized = codes_for(x, linear.contract)
    values = quantized.codes.double() * quantized.scale.double()
    expected = values @ (weight.codes.double() * weight.scale.double()).T
    if bias:
        expected += b.double()
    out = linear.apply(x, NAME).double()
    bound = expected.abs() * 2.0**-8 + values.abs().sum(-1, keepdim=True) * 2.0**-18
    assert bool(((out - expected).abs() <= bound).all())
    assert torch.equal(weight.dequantize(), weight.codes.float() * weight.scale)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_its_own_quantiser_is_the_oracle(library, key):
    encodings = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = encodings.view(torch.bfloat16).view(128, 512)
    mine, oracle = quantize_input(x, contract(key), NAME), codes_for(x, contract(key))
    assert torch.equal(mine.codes.view(torch.uint8), oracle.codes.view(torch.uint8))
    assert torch.equal(mine.scale, oracle.scale)
    assert NAME in mine.producer


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_saturates_and_nan_reaches_its_row_only(library, dtype):
    linear, _, _ = kernel()
    x = torch.ones(3, 13, dtype=dtype)
    x[0, 2], x[1, 3] = float("inf"), float("nan")
    out = linear.apply(x, NAME)
    assert bool(out[0].isfinite().all())
    assert bool(out[1].isnan().all())
    assert bool(out[2].isfinite().all())


@pytest.mark.parametrize("key", [FP8_DYNAMIC_TOKEN, FP8_DYNAMIC_GROUP128, MXFP8], ids=str)
def test_codes_for_another_key_are_refused_by_both_names(key):
    linear, _, _ = kernel()
    q = quantize(activation(2, 13), key, producer="wrong producer")
    with pytest.raises(QuantKeyMismatchError) as caught:
        linear.apply(q, NAME)
    for part in (NAME, "wrong producer", str(key), "fp8-static-tensor"):
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bare_codes_are_refused(dtype):
    with pytest.raises(RawConsumerError, match=NAME):
        kernel()[0].apply(torch.zeros(2, 13).to(dtype), NAME)
    with pytest.raises(RawConsumerError, match=NAME):
        FloatLinear(nn.Linear(13, 2)).apply(torch.zeros(2, 13).to(dtype), NAME)


def test_an_input_of_another_width_is_refused():
    for shape in [(2, 26), (2, 12), (4, 6, 5)]:
        with pytest.raises((RuntimeError, ValueError, ContractError)):
            kernel()[0].apply(activation(*shape), NAME)


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_key_without_scale_is_a_scale_error(library, dtype):
    # Whatever kernel quantises: an assert would be another error, and none under `python -O`.
    weight = QuantizedWeight.from_float(torch.ones(2, 4), NAME)
    with pytest.raises((ScaleError, ConfigError), match="scale"):
        EmulatedLinear(weight, None, InputContract(FP8_STATIC_TENSOR)).apply(
            torch.ones(1, 4, dtype=dtype), NAME
        )


def test_decoding_all_codes(library):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    for view in (codes, codes[:, ::2], codes[1:3], codes.t()):
        assert torch.equal(code_values(view).nan_to_num(777), view.float().nan_to_num(777))


# --- contracts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.0, -1.0, float("nan"), float("inf"), torch.ones(2)])
def test_bad_input_scales_are_refused_with_the_layer(scale):
    with pytest.raises(ScaleError, match="down_proj"):
        InputScale.checked(scale, NAME)


def test_an_input_scale_does_not_follow_the_tensor_it_was_made_from():
    given = torch.tensor([0.5])
    scale = InputScale.checked(given, NAME)
    assert scale.reciprocal == 2.0
    given.fill_(4.0)
    assert scale.value.item() == 0.5
    assert scale.number * scale.reciprocal == 1.0


def test_reciprocal_is_rounded_to_float32_once():
    scale = InputScale.checked(3.0, NAME)
    assert scale.reciprocal == (torch.ones(1) / torch.tensor([3.0])).item()
    assert scale.reciprocal != 1 / 3


def test_same_input_means_equal_bytes():
    assert contract(scale=0.5).same_input(contract(scale=0.5))
    assert not contract(scale=0.5).same_input(contract(scale=0.25))
    assert not contract().same_input(contract(FP8_DYNAMIC_TOKEN))
    assert contract(FP8_DYNAMIC_TOKEN).same_input(contract(FP8_DYNAMIC_TOKEN))
    assert InputContract(None).same_input(InputContract(None))
    assert not InputContract(None).same_input(contract())


# --- float -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_float_linear_is_the_module(dtype):
    module = nn.Linear(13, 5).to(dtype)
    linear = FloatLinear(module)
    x = activation(2, 3, 13, dtype=dtype)
    assert torch.equal(linear.apply(x, NAME), module(x))
    assert (linear.out_features, linear.in_features) == (5, 13)
    assert linear.contract.key is None


def test_float_linear_refuses_codes():
    q = codes_for(activation(2, 13), contract())
    with pytest.raises(RawConsumerError, match=r"down_proj.*test producer"):
        FloatLinear(nn.Linear(13, 5)).apply(q, NAME)


def test_conv1d_is_a_linear_with_its_weight_transposed():
    module = Conv1D(5, 13)
    nn.init.normal_(module.bias)
    linear = FloatLinear(module)
    x = activation(2, 3, 13, dtype=torch.float32)
    assert (linear.out_features, linear.in_features) == linear_shape(module) == (5, 13)
    assert torch.equal(linear.apply(x, NAME), module(x))
    assert float_weight(module).shape == (5, 13)
    weight = QuantizedWeight.from_float(float_weight(module), NAME)
    assert weight.codes.shape == (5, 13)
    assert weight.codes.is_contiguous()
    quantized = EmulatedLinear(weight, module.bias, contract(scale=0.1)).apply(x, NAME)
    assert (quantized - module(x)).abs().max() < 0.3
    expected = F.linear(
        codes_for(x, contract(scale=0.1)).codes.float() * 0.1, weight.dequantize(), module.bias
    )
    assert torch.allclose(quantized, expected, atol=1e-5)


# --- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_not_finite_are_refused(value, dtype):
    weight = torch.ones(4, 8, dtype=dtype)
    weight[3, 7] = value
    with pytest.raises(ScaleError, match="down_proj"):
        QuantizedWeight.from_float(weight, NAME)


def test_weight_of_zeros_stays_finite():
    weight = QuantizedWeight.from_float(torch.zeros(2, 8), NAME)
    assert not weight.dequantize().any()
    assert bool((weight.scale > 0).all())


def test_each_output_channel_has_its_own_scale():
    weight = torch.ones(3, 8) * torch.tensor([[1e-3], [1.0], [1e3]])
    quantized = QuantizedWeight.from_float(weight, NAME)
    assert quantized.scale.shape == (3, 1)
    assert torch.allclose(quantized.dequantize(), weight, rtol=1e-6)


# --- what can be wrapped -----------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class OwnForwardConv(Conv1D):
    def forward(self, x):
        return super().forward(x) * 2


class OnlyNamed(nn.Linear):
    """A subclass that behaves as its parent."""


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def parametrized() -> nn.Module:
    module = nn.Linear(4, 4)
    parametrize.register_parametrization(module, "weight", Doubled())
    return module


def patched() -> nn.Module:
    module = nn.Linear(4, 4)
    module.forward = lambda x: x
    return module


def of_dtype(dtype: torch.dtype) -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: OwnForward(4, 4), "forward"),
        (lambda: OwnForwardConv(4, 4), "forward"),
        (patched, "forward"),
        (parametrized, "parametrization"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "parametrization"),
        (lambda: nn.Linear(4, 4, device="meta"), "meta"),
        (lambda: of_dtype(torch.int8), "int8"),
        (lambda: of_dtype(torch.uint8), "uint8"),
        (lambda: of_dtype(torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda: nn.Conv1d(4, 4, 1), "Conv1d"),
        (lambda: nn.Embedding(4, 4), "Embedding"),
        (lambda: nn.Bilinear(4, 4, 4), "Bilinear"),
        (lambda: nn.LazyLinear(4), ""),
    ],
)
def test_linear_refusal_says_why(make, word):
    reason = linear_refusal(make())
    assert reason
    assert word in reason


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Linear(4, 4, bias=False),
        lambda: OnlyNamed(4, 4),
        lambda: Conv1D(4, 4),
        lambda: of_dtype(torch.float16),
        lambda: of_dtype(torch.bfloat16),
    ],
)
def test_plain_linears_can_be_wrapped(make):
    assert linear_refusal(make()) is None


def test_attention_that_reads_its_projection_without_calling_it_is_refused():
    attention = nn.MultiheadAttention(8, 2)
    # It hands `out_proj.weight` to a function: a routed linear in its place is never called.
    assert linear_refusal(attention.out_proj)
