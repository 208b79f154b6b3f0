"""Which adapter makes room: policies as values, and the queue that finds the next one.

Using an adapter must cost nothing here, for that happens in every batch.  So the queue does not
follow uses: it is a heap of what each member was worth when it was entered, and a member that
turns out to be worth more by now is entered again when it comes to the top.  Worth only grows by
use, which makes the first member that is up to date the one worth least.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, Protocol, TypeVar


class Usage(Protocol):
    """What policies compare; `hits` and `tick` never fall.

    Attributes:
        hits: how many batches used it.
        tick: when the last of them began, in batches.
        priority: as it was set; a higher one stays longer.
    """

    hits: int
    tick: int
    priority: int


class Eviction(StrEnum):
    """Which adapter makes room for another one."""

    LRU = "lru"
    LFU = "lfu"
    PRIORITY = "priority"

    def worth(self, item: Usage) -> tuple[int, int]:
        """What is worth least goes first: by last use, by number of uses, or by priority."""
        if self is Eviction.LRU:
            return (item.tick, 0)
        first = item.hits if self is Eviction.LFU else item.priority
        return (first, item.tick)


_Item = TypeVar("_Item", bound=Usage)


class EvictionQueue(Generic[_Item]):
    """Members in the order in which they would go.

    Args:
        policy: decides on the order.
    """

    def __init__(self, policy: Eviction) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, int], int, _Item]] = []
        self._entered: dict[_Item, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entered)

    def __contains__(self, item: _Item) -> bool:
        return item in self._entered

    def add(self, item: _Item) -> None:
        """Enter a member; again, where its priority has changed."""
        self._serial += 1
        self._entered[item] = self._serial
        heapq.heappush(self._heap, (self._policy.worth(item), self._serial, item))
        # Entries of members that left stay in the heap until they come to its top.
        if len(self._heap) > 2 * len(self._entered) + 64:
            self._heap = [entry for entry in self._heap if self._entered.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: _Item) -> None:
        """Take a member out, if it is one."""
        self._entered.pop(item, None)

    def first(self, may_go: Callable[[_Item], bool]) -> _Item | None:
        """The member worth least among those that may go; it stays a member.

        The cost grows with the logarithm of the members, and with how many of those worth less may
        not go.
        """
        passed: list[_Item] = []
        found = None
        while self._heap and found is None:
            worth, serial, item = heapq.heappop(self._heap)
            if self._entered.get(item) != serial:
                continue
            if worth == self._policy.worth(item):
                passed.append(item)
                found = item if may_go(item) else None
            else:
                self.add(item)
        for item in passed:
            self.add(item)
        return found
