"""How much of each tier adapters may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .eviction import Eviction


@dataclass(frozen=True)
class TierLimits:
    """The sizes of the tiers.

    Attributes:
        slots: on the device, how many adapters of each rank; empty switches adapters off.  Of every
            rank there is one more, so that a swap need not wait for the batches on the old version.
        max_cpu_loras: how many adapters host memory keeps; None for no such limit.
        max_cpu_lora_bytes: their size; None for no such limit.
        eviction: which adapter makes room.
    """

    slots: Mapping[int, int]
    max_cpu_loras: int | None = None
    max_cpu_lora_bytes: int | None = None
    eviction: Eviction = Eviction.LRU

    @property
    def width(self) -> int:
        """The highest rank that fits any slot; 0 without slots."""
        return max((rank for rank, count in self.slots.items() if count), default=0)

    @property
    def count(self) -> int:
        """How many adapters fit the device at once."""
        return sum(self.slots.values())
