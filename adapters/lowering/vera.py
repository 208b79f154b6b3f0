"""VeRA (arXiv 2310.11454): two random matrices that all modules share, two trained vectors each.

    y = base(x) + lambda_b * ((lambda_d * (x @ A[:, :K].T)) @ B[:N].T)

The shared matrices are as wide as the widest targeted linears.  They lie in the file where
`save_projection` was set; else they come from a seeded generator, on the CPU, A before B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...core.errors import AdapterMismatchError
from ..weights import LayerWeights, LowRank
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True, eq=False)
class VeraProjections:
    """What all modules of one adapter share.

    Args:
        a: `(r, Kmax)`, `vera_A`.
        b: `(Nmax, r)`, `vera_B`.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, eq=False)
class VeraSettings:
    """The settings of one module.

    Args:
        rank: r.
        projections: of its adapter, stored or from `regenerate`.
    """

    rank: int
    projections: VeraProjections


def regenerate(key: int, rank: int, in_features: int, out_features: int) -> VeraProjections:
    """The matrices that PEFT draws for `projection_prng_key`, float32, bit for bit.

    He's uniform initialisation: bound `sqrt(3) * sqrt(2) / sqrt(fan_in)` with the second size as
    fan-in; the order of these operations decides the last bit.

    Args:
        key: seeds torch's CPU generator.
        rank: r.
        in_features: the largest K of the targeted linears.
        out_features: their largest N.
    """
    generator = torch.Generator(device="cpu").manual_seed(key)

    def draw(rows: int, columns: int) -> torch.Tensor:
        bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns))
        return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)

    a = draw(rank, in_features)
    return VeraProjections(a, draw(out_features, rank))


def shapes(settings: VeraSettings, base: BaseLinear) -> Shapes:
    """vera_lambda_d `(r,)`, vera_lambda_b `(N,)`."""
    return {"vera_lambda_d": (settings.rank,), "vera_lambda_b": (base.out_features,)}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: VeraSettings, base: BaseLinear
) -> LayerWeights:
    """A low-rank part with the vectors folded into its slice of the shared matrices.

    A rank that no slot holds becomes a dense delta: VeRA's ranks run into the hundreds (PEFT's
    default is 256), since they cost its files next to nothing.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
        AdapterMismatchError: shared matrices that are too small for this linear.
    """
    given = checked(tensors, shapes(settings, base), base)
    a, b = settings.projections.a, settings.projections.b
    if a.shape[0] != settings.rank or b.shape[1] != settings.rank:
        raise AdapterMismatchError(
            f"adapter on {base.name}",
            f"vera_A has {a.shape[0]} rows, vera_B {b.shape[1]} columns, and r is {settings.rank}",
            "save it with PEFT again",
        )
    if a.shape[1] < base.in_features or b.shape[0] < base.out_features:
        raise AdapterMismatchError(
            f"adapter on {base.name}",
            f"vera_A takes {a.shape[1]} inputs and vera_B gives {b.shape[0]} outputs, fewer than "
            f"{base.in_features} and {base.out_features}",
            "load it on the base model that it was trained on",
        )
    folded_a = given["vera_lambda_d"].float()[:, None] * a[:, : base.in_features].float()
    folded_b = given["vera_lambda_b"].float()[:, None] * b[: base.out_features].float()
    if settings.rank > base.max_rank:
        return LayerWeights(delta=folded_b @ folded_a)
    return LayerWeights(low_rank=LowRank(folded_a, folded_b, 1.0))
