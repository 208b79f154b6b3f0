"""LoHa (arXiv 2108.06098): the elementwise product of two low-rank products.

    delta = alpha / r * (w1_a @ w1_b) * (w2_a @ w2_b)

Elementwise, a product of sums is a sum over pairs, so the delta has the rank r²: column (i, j) of
its b is `w1_a[:, i] * w2_a[:, j]`, row (i, j) of its a is `w1_b[i] * w2_b[j]` (Khatri–Rao).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights import LayerWeights, LowRank
from .base import BaseLinear, Shapes, checked, product_serves


@dataclass(frozen=True)
class LoHaSettings:
    """The settings of one module, after all patterns: r and alpha."""

    rank: int
    alpha: float

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


def shapes(settings: LoHaSettings, base: BaseLinear) -> Shapes:
    """hada_w1_a and hada_w2_a `(N, r)`, hada_w1_b and hada_w2_b `(r, K)`."""
    left, right = (base.out_features, settings.rank), (settings.rank, base.in_features)
    return {"hada_w1_a": left, "hada_w1_b": right, "hada_w2_a": left, "hada_w2_b": right}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: LoHaSettings, base: BaseLinear
) -> LayerWeights:
    """A low-rank part of rank r² where that is cheaper, else a delta.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
    """
    given = checked(tensors, shapes(settings, base), base)
    w1_a, w1_b, w2_a, w2_b = (tensor.float() for tensor in given.values())
    rank = settings.rank**2
    if not product_serves(rank, base):
        return LayerWeights(delta=(w1_a @ w1_b) * (w2_a @ w2_b) * settings.scaling)
    b = (w1_a[:, :, None] * w2_a[:, None, :]).reshape(base.out_features, rank)
    a = (w1_b[:, None, :] * w2_b[None, :, :]).reshape(rank, base.in_features)
    return LayerWeights(low_rank=LowRank(a, b, settings.scaling))
