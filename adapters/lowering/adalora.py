"""AdaLoRA (arXiv 2303.10512): a product in the form of a singular value decomposition.

    y = base(x) + alpha / (init_r + 1e-5) * (x @ (lora_A * lora_E).T) @ lora_B.T

An alpha that is not positive stands for the rank.  `init_r` divides whatever rank the training
left to the module; PEFT does not save it, but sets it from the config and keeps it on resizing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights import LayerWeights, LowRank
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class AdaLoraSettings:
    """The settings of one module.

    Args:
        rank: what `rank_pattern` leaves of this module (the number of its true entries); `init_r`
            without a pattern.  May be 0.
        init_r: the rank that training began with.
        alpha: `lora_alpha`.
    """

    rank: int
    init_r: int
    alpha: float

    @property
    def scaling(self) -> float:
        """PEFT's, which adds 1e-5 to the divisor in float32."""
        divisor = torch.tensor(float(self.init_r)) + 1e-5
        return float(torch.tensor(self.alpha if self.alpha > 0 else float(self.rank)) / divisor)


def shapes(settings: AdaLoraSettings, base: BaseLinear) -> Shapes:
    """lora_A `(r, K)`, lora_E `(r, 1)`, lora_B `(N, r)`."""
    return {
        "lora_A": (settings.rank, base.in_features),
        "lora_E": (settings.rank, 1),
        "lora_B": (base.out_features, settings.rank),
    }


def lower(
    tensors: Mapping[str, torch.Tensor], settings: AdaLoraSettings, base: BaseLinear
) -> LayerWeights:
    """A low-rank part whose a is `lora_A * lora_E`; no part at rank 0.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
    """
    given = checked(tensors, shapes(settings, base), base)
    if settings.rank == 0:
        return LayerWeights()
    a = given["lora_A"].float() * given["lora_E"].float()
    return LayerWeights(low_rank=LowRank(a, given["lora_B"], settings.scaling))
