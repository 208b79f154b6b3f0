"""LoKr (arXiv 2309.14859): a Kronecker product.

    delta = alpha / r * kron(w1, w2),   w1 (p, q), w2 (m, n),   N = p m, K = q n

with w1 and w2 stored whole, or as `w1_a @ w1_b` and `w2_a @ w2_b` of rank r.  Kronecker products
multiply factor by factor, `kron(w1_a w1_b, w2_a w2_b) = kron(w1_a, w2_a) @ kron(w1_b, w2_b)`, so
with a factor that is thin the delta is a thin product as well; a whole factor w is `w @ 1` or
`1 @ w`, whichever is thinner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights import LayerWeights, LowRank
from .base import BaseLinear, Shapes, checked, product_serves


@dataclass(frozen=True)
class LoKrSettings:
    """The settings of one module, after all patterns.

    Args:
        rank: r.
        alpha: scaling is alpha / r.
        decompose_both: whether w1 may be stored as a product too.
        decompose_factor: the size that one side of the factors aims at; -1 for square.
    """

    rank: int
    alpha: float
    decompose_both: bool = False
    decompose_factor: int = -1

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


def factorise(size: int, factor: int) -> tuple[int, int]:
    """The two factors, the smaller first, into which PEFT splits a size of K or N.

    The given factor where it divides the size (it then comes first, smaller or not).  Else the
    most square pair whose smaller one does not exceed it, -1 meaning without such a limit.
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    limit = math.isqrt(size) if factor == -1 else min(factor, math.isqrt(size))
    best = next(divisor for divisor in range(limit, 0, -1) if size % divisor == 0)
    return best, size // best


def shapes(settings: LoKrSettings, base: BaseLinear) -> Shapes:
    """lokr_w1 `(p, q)` or lokr_w1_a `(p, r)`, lokr_w1_b `(r, q)`; the same of w2 `(m, n)`."""
    p, m = factorise(base.out_features, settings.decompose_factor)
    q, n = factorise(base.in_features, settings.decompose_factor)
    splits_w1 = settings.decompose_both and settings.rank < max(p, q) / 2
    splits_w2 = settings.rank < max(m, n) / 2
    expected: Shapes = {}
    for name, rows, columns, is_split in (
        ("lokr_w1", p, q, splits_w1),
        ("lokr_w2", m, n, splits_w2),
    ):
        if is_split:
            expected[f"{name}_a"] = (rows, settings.rank)
            expected[f"{name}_b"] = (settings.rank, columns)
        else:
            expected[name] = (rows, columns)
    return expected


def lower(
    tensors: Mapping[str, torch.Tensor], settings: LoKrSettings, base: BaseLinear
) -> LayerWeights:
    """A low-rank part where that is cheaper, else a delta.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
    """
    given = checked(tensors, shapes(settings, base), base)
    left1, right1 = _thin(given, "lokr_w1")
    left2, right2 = _thin(given, "lokr_w2")
    if not product_serves(left1.shape[1] * left2.shape[1], base):
        delta = torch.kron(left1 @ right1, left2 @ right2) * settings.scaling
        return LayerWeights(delta=delta)
    a, b = torch.kron(right1, right2), torch.kron(left1, left2)
    return LayerWeights(low_rank=LowRank(a, b, settings.scaling))


def _thin(given: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A factor as a product, float32."""
    if name not in given:
        return given[f"{name}_a"].float(), given[f"{name}_b"].float()
    whole = given[name].float()
    rows, columns = whole.shape
    if rows < columns:
        return torch.eye(rows), whole
    return whole, torch.eye(columns)
