"""The base's own weights, for adapters whose parts depend on them."""

from __future__ import annotations

import torch
from torch import nn

from .registry import LayerRegistry


class BaseWeightsOf:
    """Weights of a served model, as its linears multiply with them.

    Args:
        model: whose linears are routed.
        registry: of its linears.
    """

    def __init__(self, model: nn.Module, registry: LayerRegistry) -> None:
        self._model = model
        self._registry = registry

    def weight(self, name: str) -> torch.Tensor:
        """A linear's weight, dequantised, or an embedding's table.

        Args:
            name: full name in the model.

        Returns:
            float32, on the CPU, a copy: (N, K), or (V, D).
        """
        layer = self._registry.layers.get(name)
        if layer is not None:
            return layer.kernel.dequantized().cpu()
        table = self._model.get_submodule(name).weight
        assert isinstance(table, torch.Tensor)
        return table.detach().to("cpu", torch.float32, copy=True)

    def bias(self, name: str) -> torch.Tensor | None:
        """A linear's bias: float32 (N,), on the CPU, a copy; None where it has none."""
        bias = self._registry.layers[name].kernel.bias()
        return None if bias is None else bias.detach().to("cpu", torch.float32, copy=True)
