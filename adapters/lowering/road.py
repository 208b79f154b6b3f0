"""RoAd (arXiv 2409.00119): the output is rotated, pair by pair, and scaled.

In each group of g outputs, output i of the first half and output i of the second make a pair:

    y_i         = alpha_i cos(theta_i) z_i          - alpha_i sin(theta_i) z_(i + g/2)
    y_(i + g/2) = alpha_j cos(theta_j) z_(i + g/2)  + alpha_j sin(theta_j) z_i       (j = i + g/2)

with z the base's output, bias included.  `road_1` stores one angle and scale for a pair, `road_2`
one for an output, `road_4` one for a cosine and one for a sine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ...core.errors import AdapterMismatchError
from ..weights import LayerWeights, RotationFactor
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class RoadSettings:
    """The settings of all modules.

    Args:
        variant: how many numbers are stored.
        group_size: g.
    """

    variant: Literal["road_1", "road_2", "road_4"] = "road_1"
    group_size: int = 64


def shapes(settings: RoadSettings, base: BaseLinear) -> Shapes:
    """road_theta and road_alpha: `(N / 2,)`, `(N,)` or `(2 N,)`.

    Raises:
        AdapterMismatchError: the group is odd, or does not divide N.
    """
    if settings.group_size % 2 or base.out_features % settings.group_size:
        raise AdapterMismatchError(
            f"adapter on {base.name}",
            f"groups of {settings.group_size} do not halve and divide its {base.out_features} "
            "outputs",
            "load it on the base model that it was trained on",
        )
    numbers = {"road_1": 1, "road_2": 2, "road_4": 4}[settings.variant]
    shape = (base.out_features * numbers // 2,)
    return {"road_theta": shape, "road_alpha": shape}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: RoadSettings, base: BaseLinear
) -> LayerWeights:
    """One rotation factor of the output, of N / g blocks.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`, `shapes`.
    """
    given = checked(tensors, shapes(settings, base), base)
    groups, size = base.out_features // settings.group_size, settings.group_size
    theta, alpha = (
        _by_output(given[name].float(), settings.variant, groups, size)
        for name in ("road_theta", "road_alpha")
    )
    cosine, sine = alpha[:, 0] * theta[:, 0].cos(), alpha[:, 1] * theta[:, 1].sin()
    half, index = size // 2, torch.arange(size)
    sine[:, :half] *= -1
    blocks = torch.zeros(groups, size, size)
    # Column j of a block makes output j: of z_j, and of z in the other half.
    blocks[:, index, index] = cosine
    blocks[:, (index + half) % size, index] = sine
    return LayerWeights(output_rotation=(RotationFactor(blocks),))


def _by_output(stored: torch.Tensor, variant: str, groups: int, size: int) -> torch.Tensor:
    """`(groups, 2, size)`: of the cosine and of the sine of each output."""
    if variant == "road_4":
        return stored.reshape(groups, 2, size)
    if variant == "road_1":
        stored = stored.reshape(groups, 1, size // 2).expand(-1, 2, -1)
    return stored.reshape(groups, 1, size).expand(-1, 2, -1)
