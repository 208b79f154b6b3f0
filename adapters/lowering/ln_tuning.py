"""LN tuning (arXiv 2312.11420): a norm's own weights, trained; PEFT runs a copy in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights import NormWeights
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class LnTuningSettings:
    """The settings of one norm.

    Args:
        has_bias: whether the base's norm has one.
    """

    has_bias: bool


def shapes(settings: LnTuningSettings, features: int) -> Shapes:
    """weight `(K,)`, and bias `(K,)` where the norm has one."""
    names = ("weight", "bias") if settings.has_bias else ("weight",)
    return dict.fromkeys(names, (features,))


def lower(
    tensors: Mapping[str, torch.Tensor], settings: LnTuningSettings, name: str, features: int
) -> NormWeights:
    """The weights as stored, in the dtype in which they were stored.

    Args:
        tensors: of `shapes`.
        settings: of this norm.
        name: the norm's full name in the base model.
        features: K.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
    """
    given = checked(tensors, shapes(settings, features), BaseLinear(name, features, features))
    return NormWeights(given["weight"], given.get("bias"))
