"""One loaded adapter, and its line of the listing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .weights import AdapterWeights

_identities = itertools.count(1)


@dataclass(frozen=True)
class AdapterInfo:
    """One line of the listing.

    Attributes:
        name: what rows call it.
        digest: SHA-256 of what it computes; its identity (I9).
        source: where it came from.
        rank: the highest of any layer.
        layers: how many linears it has a branch on.
        nbytes: size as stored.
        slot: its row in the stacked tensors.
        batches: how many batches in flight use it.
        notes: such as "no effect: every lora_B is zero".
    """

    name: str
    digest: str
    source: str
    rank: int
    layers: int
    nbytes: int
    slot: int
    batches: int
    notes: tuple[str, ...]


class Version:
    """One loaded content of a name.

    Args:
        name: it was loaded under.
        slot: its row in the stacked tensors.
        weights: what was loaded; not kept.

    Attributes:
        key: its identity.
        shrink_ranks: by layer it has a branch on, `LayerWeights.shrink_rank`.
        batches: how many batches in flight use it.
        retired: no name points at it any more.
    """

    def __init__(self, name: str, slot: int, weights: AdapterWeights) -> None:
        self.key = next(_identities)
        self.name = name
        self.slot = slot
        self.shrink_ranks = {layer: parts.shrink_rank for layer, parts in weights.layers.items()}
        self.batches = 0
        self.retired = False
        self._facts = (
            weights.digest, weights.source, weights.rank, len(weights.layers), weights.nbytes,
        )  # fmt: skip
        self._notes = weights.notes

    def info(self) -> AdapterInfo:
        """Its line of the listing."""
        return AdapterInfo(self.name, *self._facts, self.slot, self.batches, self._notes)
