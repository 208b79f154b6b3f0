"""OFT (arXiv 2306.07280, 2506.19847): the input is rotated block by block before the base.

    y = base(x R),   R = diag(R_1, ..., R_r),   R_i = (I - Q_i) (I + Q_i)^-1   (Cayley)

Q_i is skew-symmetric; its upper triangle is stored row by row.  PEFT's default replaces the
inverse by the first terms of its Neumann series, whose last term enters once instead of twice:

    R_i = I + 2 Q + 2 Q^2 + ... + 2 Q^(t-2) + Q^(t-1)      (t = 5 terms)

Constrained OFT first scales each Q_i down to a norm of at most `eps / sqrt(stored blocks)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...core.errors import AdapterFormatError
from ..weights import LayerWeights, RotationFactor
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class OftSettings:
    """The settings of one module, after all patterns.

    Args:
        r: the number of blocks; 0 where the block size is given.
        block_size: `oft_block_size`; 0 where the number is given.
        coft: whether the rotations are constrained.
        eps: of the constraint.
        block_share: whether one stored block serves all.
        use_cayley_neumann: whether the inverse is a series.
        num_cayley_neumann_terms: t, how many terms of it.
    """

    r: int = 0
    block_size: int = 32
    coft: bool = False
    eps: float = 6e-5
    block_share: bool = False
    use_cayley_neumann: bool = True
    num_cayley_neumann_terms: int = 5


def block_size(settings: OftSettings, base: BaseLinear) -> int:
    """b, as PEFT makes it fit K: a block size or number that does not divide K is moved to the
    nearest that does, the smaller of two.

    Raises:
        AdapterFormatError: neither or both of the two are given.
    """
    if (settings.r == 0) == (settings.block_size == 0):
        raise AdapterFormatError(
            f"adapter on {base.name}",
            f"r is {settings.r} and oft_block_size {settings.block_size}; one of them must be 0",
            "save it with PEFT again",
        )
    if settings.r:
        return base.in_features // _nearest_divisor(base.in_features, settings.r)
    return _nearest_divisor(base.in_features, settings.block_size)


def shapes(settings: OftSettings, base: BaseLinear) -> Shapes:
    """oft_R `(K / b, b (b - 1) / 2)`; one row where the block is shared."""
    size = block_size(settings, base)
    count = 1 if settings.block_share else base.in_features // size
    return {"oft_R": (count, size * (size - 1) // 2)}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: OftSettings, base: BaseLinear
) -> LayerWeights:
    """One rotation factor of K / b blocks.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
    """
    vectors = checked(tensors, shapes(settings, base), base)["oft_R"].float()
    size = block_size(settings, base)
    skew = _skew(vectors, size)
    if settings.coft:
        limit = settings.eps / vectors.shape[0] ** 0.5
        norm = torch.linalg.matrix_norm(skew)[:, None, None]
        skew = torch.where(norm <= limit, skew, skew * (limit / norm))
    if settings.use_cayley_neumann:
        blocks = _neumann(skew, settings.num_cayley_neumann_terms)
    else:
        blocks = cayley(skew)
    if settings.block_share:
        blocks = blocks.repeat(base.in_features // size, 1, 1)
    return LayerWeights(rotation=(RotationFactor(blocks),))


def cayley(skew: torch.Tensor) -> torch.Tensor:
    """`(I - Q) (I + Q)^-1` of each skew-symmetric `(..., b, b)`, in its dtype."""
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype)
    return torch.linalg.solve(identity + skew, identity - skew, left=False)


def _skew(vectors: torch.Tensor, size: int) -> torch.Tensor:
    rows, columns = torch.triu_indices(size, size, 1)
    upper = torch.zeros(vectors.shape[0], size, size)
    upper[:, rows, columns] = vectors
    return upper - upper.mT


def _neumann(skew: torch.Tensor, terms: int) -> torch.Tensor:
    total = torch.eye(skew.shape[-1]).repeat(skew.shape[0], 1, 1)
    if terms < 2:
        return total
    total += 2 * skew
    if terms == 2:
        return total
    power = skew @ skew
    total += 2 * power
    # With three terms PEFT adds the next power all the same: it computes as with four.
    for _ in range(3, terms - 1):
        power = power @ skew
        total += 2 * power
    return total + power @ skew


def _nearest_divisor(size: int, wanted: int) -> int:
    if wanted >= size:
        return size
    below = next(d for d in range(wanted, 0, -1) if size % d == 0)
    above = next(d for d in range(wanted, size + 1) if size % d == 0)
    return below if wanted - below <= above - wanted else above
