"""W8A16: quantised weights times unquantised activations, so nothing upstream can be fused."""

from __future__ import annotations

import torch

from ...core.platform import Platform
from ...core.quant_key import QuantKey
from ...core.quantized_activation import QuantizedActivation, as_quantized_activation
from ...core.selection import ACCEPTED, Verdict
from ..quantized_weight import QuantizedWeight
from .base import LinearConfig, QuantizedKernel


class W8A16Linear(QuantizedKernel):
    """Weights stay codes in memory; every call makes a float copy of them, by way of float32."""

    name = "w8a16"

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        return ACCEPTED

    @classmethod
    def can_implement(cls, config: LinearConfig) -> Verdict:
        return ACCEPTED

    @classmethod
    def consumes(cls, config: LinearConfig) -> QuantKey | None:
        return None

    def _take(self, weight: QuantizedWeight) -> None:
        self._source = weight

    @property
    def weight_bytes(self) -> int:
        return self._source.nbytes

    def quantized_weight(self) -> QuantizedWeight:
        return self._source

    def apply(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> torch.Tensor:
        as_quantized_activation(x, None, consumer=consumer)
        assert isinstance(x, torch.Tensor)
        weight = self._source.dequantize().to(x.dtype)
        bias = None if self._bias is None else self._bias.to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)
