"""The branch of each kind of place that takes adapters."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..linear.branching import Place
from ..linear.experts.layer import ExpertsLinear
from ..linear.routed import RoutedLinear
from ..linear.router import RouterPlace
from .branch import LayerBranch
from .embedding import EmbeddingPlace
from .experts import ExpertsBranch
from .norm import NormBranch, NormPlace
from .router import RouterBranch
from .slots import SlotClasses


class AnyBranch(Protocol):
    """What adapters in slots do in one place."""

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        ...

    def write(self, slot: int, weights: Any) -> None:
        """Fill a slot with parts of the place's kind; nothing of what was there before is left."""
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        ...


def make_branch(
    place: Place, slots: SlotClasses, dtype: torch.dtype, device: torch.device
) -> AnyBranch:
    """An empty branch for `place`, which the caller attaches to it.

    Args:
        place: a linear, an embedding, a norm, a projection of experts or a router of the registry.
        slots: of the model.
        dtype: of the stacked matrices.
        device: where the slots lie.
    """
    if isinstance(place, EmbeddingPlace):
        return place.new_branch(dtype)
    if isinstance(place, NormPlace):
        return NormBranch(place)
    if isinstance(place, ExpertsLinear):
        sizes = place.experts, place.in_features, place.out_features
        return ExpertsBranch(place.name, slots, *sizes, dtype, device)
    if isinstance(place, RouterPlace):
        experts, inputs = place.weight.shape
        # A last bit of a score can choose another expert, and scores are few.
        return RouterBranch(place.name, slots, inputs, experts, torch.float32, device)
    assert isinstance(place, RoutedLinear)
    return LayerBranch(place.name, slots, place.in_features, place.out_features, dtype, device)
