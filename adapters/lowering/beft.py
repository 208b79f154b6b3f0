"""BEFT (arXiv 2509.15974): a bias, and nothing else: `y = base(x) + beft_bias`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights import LayerWeights
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class BeftSettings:
    """No setting of BEFT changes what it computes."""


def shapes(settings: BeftSettings, base: BaseLinear) -> Shapes:
    """beft_bias `(1, N)`."""
    return {"beft_bias": (1, base.out_features)}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: BeftSettings, base: BaseLinear
) -> LayerWeights:
    """A shift.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
    """
    bias = checked(tensors, shapes(settings, base), base)["beft_bias"]
    return LayerWeights(shift=bias.float().flatten())
