"""The slots of one simulated replica: who lies in them, and who makes room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...adapters.tiers.eviction import EvictionQueue
from ...adapters.tiers.limits import TierLimits


@dataclass(eq=False)
class SimulatedAdapter:
    """One adapter of a replica.

    Attributes:
        name: of it.
        kind: number of its kind: what it holds where.
        rank: of it.
        nbytes: that are written into a slot.
        slot: rank of the slot that it has; None without one.
        hits, tick, priority: see `Usage`.
    """

    name: str
    kind: int
    rank: int
    nbytes: int
    slot: int | None = None
    hits: int = 0
    tick: int = 0
    priority: int = 0


@dataclass(eq=False)
class _SlotClass:
    rank: int
    free: int
    queue: EvictionQueue[SimulatedAdapter] = field(repr=False)


class SimulatedSlots:
    """As the device tier gives slots: the lowest class that fits, a free one first.

    Args:
        limits: how many slots of which rank, and who makes room.
    """

    def __init__(self, limits: TierLimits) -> None:
        self._classes = [
            _SlotClass(rank, count, EvictionQueue(limits.eviction))
            for rank, count in sorted(limits.slots.items())
        ]
        self._tick = 0

    def place(self, batch: Iterable[SimulatedAdapter]) -> list[SimulatedAdapter]:
        """Give each adapter of a batch a slot; those that had none."""
        self._tick += 1
        wanted = tuple(batch)
        for adapter in wanted:
            adapter.hits += 1
            adapter.tick = self._tick
        missing = [adapter for adapter in wanted if adapter.slot is None]
        # Those that fit the fewest slots choose first, and none is entered before all have chosen.
        moves = [
            (adapter, self._take(adapter, wanted))
            for adapter in sorted(missing, key=lambda adapter: -adapter.rank)
        ]
        for adapter, slots in moves:
            adapter.slot = slots.rank
            slots.queue.add(adapter)
        return missing

    def _take(self, adapter: SimulatedAdapter, batch: tuple[SimulatedAdapter, ...]) -> _SlotClass:
        fitting = [slots for slots in self._classes if slots.rank >= adapter.rank]
        for slots in fitting:
            if slots.free:
                slots.free -= 1
                return slots
        for slots in fitting:
            victim = slots.queue.first(lambda other: other not in batch)
            if victim is not None:
                slots.queue.discard(victim)
                victim.slot = None
                return slots
        raise AssertionError("the scheduler seats no more than there are slots")
