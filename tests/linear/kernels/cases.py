"""Kernels built beside the emulated one, and how far they may be from it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, FP8_DYNAMIC_TOKEN_UE8M0, FP8_STATIC_TENSOR
from branchline.core.quantized_activation import QuantizedActivation
from branchline.core.scheme import PER_CHANNEL, PER_TENSOR, SCHEMES, LinearScheme
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.kernels.base import CodesKernel, LinearConfig
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.quantized_weight import QuantizedWeight
from branchline.linear.quantizers import quantize_input

NAME = "layers.0.down_proj"
ROWWISE = {
    "fp8-static": SCHEMES["fp8-static"],
    "fp8-dynamic": SCHEMES["fp8-dynamic"],
    "channel-token-ue8m0": LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN_UE8M0),
    "tensor-static": LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
    "tensor-token": LinearScheme(PER_TENSOR, FP8_DYNAMIC_TOKEN),
}
BLOCKS = {name: SCHEMES[name] for name in ("fp8-block", "fp8-block-ue8m0")}
MICROSCALED = {name: SCHEMES[name] for name in ("mxfp8", "nvfp4")}


class Pair(NamedTuple):
    """A kernel and the emulated one, of the same weight, bias and scales."""

    kernel: CodesKernel
    emulated: EmulatedLinear
    weight: QuantizedWeight


def pair(
    cls: type[CodesKernel],
    scheme: LinearScheme,
    n: int,
    k: int,
    bias: torch.dtype | None = None,
    device: str = "cpu",
) -> Pair:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    made = torch.randn(n, k, generator=generator).to(device)
    weight = QuantizedWeight.from_float(made, NAME, scheme.weight)
    b = None if bias is None else torch.randn(n, generator=generator).to(bias).to(device)
    key = scheme.input
    static = InputScale.checked(torch.tensor([0.0217], device=device), NAME) if key.static else None
    given = None
    if key.global_scale:
        given = InputScale.checked(torch.tensor([0.0031], device=device), NAME)
    consumed = cls.consumes(LinearConfig(k, n, scheme))
    return Pair(
        cls(weight, b, InputContract(consumed, static, given)),
        EmulatedLinear(weight, b, InputContract(key, static, given)),
        weight,
    )


def activation(
    *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)


def codes_for(x: torch.Tensor, kernel: CodesKernel) -> QuantizedActivation:
    return quantize_input(x, kernel.contract, NAME)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(bits(got), bits(wanted))


def assert_close(
    both: Pair, x: torch.Tensor, out: torch.Tensor, accumulation: float = 2.0**-20
) -> None:
    """Equal but for the order of float32 sums and one rounding to the dtype of `x`.

    A sum's error is a fraction of the sum of magnitudes, which is no more than
    ``sqrt(sum of squares) * sqrt(sum of squares)`` of the two factors.

    Args:
        both: who computed.
        x: raw, (..., K).
        out: of `both.kernel`.
        accumulation: that fraction.
    """
    wanted = both.emulated.apply(x, NAME)
    assert (out.dtype, out.shape, out.device) == (wanted.dtype, wanted.shape, wanted.device)
    lengths = x.double().norm(dim=-1, keepdim=True) * both.weight.dequantize().double().norm(dim=1)
    rounding = 2.0 ** -{torch.bfloat16: 7, torch.float16: 10, torch.float32: 22}[out.dtype]
    bound = wanted.double().abs() * rounding + lengths * accumulation + 2.0**-24
    assert bool(((out.double() - wanted.double()).abs() <= bound).all())


def round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
