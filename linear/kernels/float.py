"""The unquantised linear: the model's own module, behind the kernel interface."""

from __future__ import annotations

import torch

from ...core.quantized_activation import QuantizedActivation, as_quantized_activation
from ..contract import InputContract
from ..weights import LinearModule, float_weight, linear_shape
from .base import LinearKernel


class FloatLinear(LinearKernel):
    """Runs the wrapped module as it is; consumes no quantised input."""

    name = "float"

    def __init__(self, module: LinearModule) -> None:
        self.module = module
        self.contract = InputContract(key=None)
        self.out_features, self.in_features = linear_shape(module)

    def float_weight(self) -> torch.Tensor:
        return self.module.weight

    def dequantized(self) -> torch.Tensor:
        return float_weight(self.module).to(torch.float32, copy=True)

    @property
    def weight_bytes(self) -> int:
        return self.module.weight.numel() * self.module.weight.element_size()

    def bias(self) -> torch.Tensor | None:
        return self.module.bias

    def apply(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> torch.Tensor:
        as_quantized_activation(x, None, consumer=consumer)
        return self.module(x)
