"""HiRA (openreview TwJrTz9cRS): a product that scales the weight number by number.

delta = W * (hira_B @ hira_A)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights import LayerWeights
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class HiraSettings:
    """The settings of one module, after all patterns: r."""

    rank: int


def shapes(settings: HiraSettings, base: BaseLinear) -> Shapes:
    """hira_A `(r, K)`, hira_B `(N, r)`."""
    return {
        "hira_A": (settings.rank, base.in_features),
        "hira_B": (base.out_features, settings.rank),
    }


def lower(
    tensors: Mapping[str, torch.Tensor], settings: HiraSettings, base: BaseLinear
) -> LayerWeights:
    """A delta of full rank; W is the weight that the base computes with.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
        AdapterUnsupportedError: without the base weight.
    """
    given = checked(tensors, shapes(settings, base), base)
    product = given["hira_B"].float() @ given["hira_A"].float()
    return LayerWeights(delta=base.float_weight("HiRA") * product)
