"""Emulated FP8 matmul: exact arithmetic of the codes in float32, on any device.

The weights are kept as float32 values on the FP8 grid, four bytes each: it computes what an FP8
tensor core computes up to the order of accumulation, and saves no memory.
"""

from __future__ import annotations

import torch

from ...core import native
from ...core.errors import KernelUnavailableError
from ...core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from ...core.quantized_activation import QuantizedActivation, as_quantized_activation
from .. import native as native_calls
from ..contract import InputContract
from ..quantizers import quantize_input
from ..weights import QuantizedWeight
from .base import LinearKernel

_SERVED = (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN)


class EmulatedFp8Linear(LinearKernel):
    """FP8 codes times FP8 weights (one scale an output channel), accumulated in float32.

    Args:
        weight: codes (N, K) and scales (N, 1).
        bias: (N,), or None.
        contract: FP8 static per-tensor with its scale, or FP8 dynamic per-token.

    Raises:
        KernelUnavailableError: another key.
        ScaleError: a static key without its scale.
    """

    name = "emulated-fp8"
    emulated = True

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, contract: InputContract
    ) -> None:
        if contract.key not in _SERVED:
            raise KernelUnavailableError(
                f"kernel {self.name}",
                f"serves the keys {' and '.join(map(str, _SERVED))}, not {contract.key}",
                "choose one of those, or another kernel",
            )
        if contract.key.static:
            contract.static_scale(f"kernel {self.name}")
        self.contract = contract
        self.out_features, self.in_features = weight.codes.shape
        self._weight_t = decode_fp8(weight.codes).t()
        self._weight_scale = weight.scale.reshape(1, -1)
        self._bias = None if bias is None else bias.detach().float()

    def bias(self) -> torch.Tensor | None:
        return self._bias

    def apply(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> torch.Tensor:
        quantized = as_quantized_activation(x, self.contract.key, consumer=consumer)
        if quantized is None:
            assert isinstance(x, torch.Tensor)
            quantized = quantize_input(x, self.contract, consumer)
        shape = quantized.orig_shape
        codes = decode_fp8(quantized.codes.reshape(-1, self.in_features))
        scale = quantized.scale.reshape(-1, 1) * self._weight_scale
        # Autocast would round the product to half precision.
        with torch.autocast(codes.device.type, enabled=False):
            out = (codes @ self._weight_t).mul_(scale)
        if self._bias is not None:
            out += self._bias
        return out.to(quantized.orig_dtype).reshape(*shape[:-1], self.out_features)


def decode_fp8(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e4m3fn codes (rows, K), no scale applied."""
    if not native.load().available or codes.device.type != "cpu" or codes.stride(-1) != 1:
        return codes.float()
    return native_calls.decode_fp8(codes)
