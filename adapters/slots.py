"""Slots by rank: how many adapters fit on the device, and how high the rank of each may be.

A slot's number, its rank and its place in every pool are fixed when the model is wrapped, so that
addresses and shapes stay what a compiled graph saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class SlotClasses:
    """The slots of a served model.

    Attributes:
        ranks: by slot, the highest rank that fits it; ascending.
    """

    ranks: tuple[int, ...]

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> SlotClasses:
        """So many slots of each rank: ``{8: 100, 64: 4}``."""
        return cls(tuple(rank for rank in sorted(counts) for _ in range(counts[rank])))

    def __len__(self) -> int:
        return len(self.ranks)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """By slot, its first row in a pool that holds the ranks of all slots one after another."""
        return tuple(accumulate(self.ranks, initial=0))[:-1]

    @property
    def rows(self) -> int:
        """Rows of such a pool."""
        return sum(self.ranks)

    @property
    def width(self) -> int:
        """The highest rank that fits any slot; 0 without slots."""
        return max(self.ranks, default=0)

    def fitting(self, rank: int) -> range:
        """The slots that hold `rank`, those of the lowest rank first."""
        first = next((slot for slot, held in enumerate(self.ranks) if held >= rank), len(self))
        return range(first, len(self))
