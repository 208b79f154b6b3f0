"""DeLoRA (arXiv 2503.18225): a product of directions, with a trained strength.

    y = base(x) + ((x * w_norm) @ A.T * (lambda / r) / (||A_i|| ||B^i||)) @ B.T

with the norms of the rows of A and of the columns of B, each at least 1e-4.  w_norm, the norms of
the base weight's columns when training began, lies in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights import LayerWeights, LowRank
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class DeloraSettings:
    """The settings of one module, after all patterns: r."""

    rank: int


def shapes(settings: DeloraSettings, base: BaseLinear) -> Shapes:
    """delora_A `(r, K)`, delora_B `(N, r)`, delora_lambda `(1,)`, delora_w_norm `(K,)`."""
    return {
        "delora_A": (settings.rank, base.in_features),
        "delora_B": (base.out_features, settings.rank),
        "delora_lambda": (1,),
        "delora_w_norm": (base.in_features,),
    }


def lower(
    tensors: Mapping[str, torch.Tensor], settings: DeloraSettings, base: BaseLinear
) -> LayerWeights:
    """A low-rank part of rank r.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
    """
    given = checked(tensors, shapes(settings, base), base)
    a, b, strength, w_norm = (tensor.float() for tensor in given.values())
    norms = a.norm(dim=1).clamp(min=1e-4) * b.norm(dim=0).clamp(min=1e-4)
    scaled_b = b * (strength / settings.rank / norms)
    return LayerWeights(low_rank=LowRank(a * w_norm, scaled_b, 1.0))
