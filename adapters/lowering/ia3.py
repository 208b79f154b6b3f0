"""(IA)³ (arXiv 2205.05638): one trained vector, of the output, or of the input in feed-forwards.

y = l * base(x)        y = base(l * x) in a feed-forward module
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights import LayerWeights
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class Ia3Settings:
    """The settings of one module.

    Args:
        is_feedforward: whether `feedforward_modules` names it.
    """

    is_feedforward: bool


def shapes(settings: Ia3Settings, base: BaseLinear) -> Shapes:
    """ia3_l: `(1, K)` in a feed-forward module, else `(N, 1)`."""
    is_input = settings.is_feedforward
    return {"ia3_l": (1, base.in_features) if is_input else (base.out_features, 1)}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: Ia3Settings, base: BaseLinear
) -> LayerWeights:
    """A gain, or in a feed-forward module an input scale.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
    """
    vector = checked(tensors, shapes(settings, base), base)["ia3_l"].float().flatten()
    if settings.is_feedforward:
        return LayerWeights(in_scale=vector)
    return LayerWeights(gain=vector)
