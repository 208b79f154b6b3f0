"""Who is in the next forward: fair between adapters, and within slots, tokens and blocks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ..serve_config import EngineConfig
from .cache import AdapterCache
from .sequence import Sequence

Adapter = str | None


@dataclass(frozen=True)
class Share:
    """What one sequence has in a step.

    Attributes:
        sequence: which.
        tokens: how many of its tokens are fed.
    """

    sequence: Sequence
    tokens: int

    @property
    def decodes(self) -> bool:
        """Whether it is one token that looks back on others."""
        return self.tokens == 1 and self.sequence.position > 0

    @property
    def completes(self) -> bool:
        """Whether all its tokens are fed then, so that its next one is chosen."""
        return self.tokens == self.sequence.pending


class Seats:
    """Which adapters take part while more are wanted than there are slots: they take turns.

    Args:
        slots: how many there are of which rank.
        turn: forwards that an adapter has before it makes room for one that waits.
    """

    def __init__(self, slots: Mapping[int, int], turn: int) -> None:
        self._slots = dict(sorted(slots.items()))
        self._turn = turn
        self._served: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._clock = 0

    def choose(self, wanted: Mapping[str, int]) -> frozenset[str]:
        """Those whose sequences may be in the next step.

        Args:
            wanted: ranks by digest, of all that have sequences.
        """
        if self._fit(wanted.values()):
            self._served.clear()
            return frozenset(wanted)
        for digest, served in tuple(self._served.items()):
            if digest not in wanted or served >= self._turn:
                # A number of its own, in the order of seating: ties would favour some for ever.
                self._clock += 1
                self._left[digest] = self._clock
                del self._served[digest]
        self._left = {digest: at for digest, at in self._left.items() if digest in wanted}
        in_turn = list(self._served)
        others = [digest for digest in wanted if digest not in self._served]
        others.sort(key=lambda digest: self._left.get(digest, 0))
        seated: dict[str, int] = {}
        for digest in (*in_turn, *others):
            if self._fit((*seated.values(), wanted[digest])):
                seated[digest] = wanted[digest]
        self._served = {digest: self._served.get(digest, 0) + 1 for digest in seated}
        return frozenset(seated)

    def _fit(self, ranks: Iterable[int]) -> bool:
        """Whether adapters of these ranks have slots at one time."""
        free = dict(self._slots)
        for rank in sorted(ranks, reverse=True):
            found = next((size for size in free if size >= rank and free[size]), None)
            if found is None:
                return False
            free[found] -= 1
        return True


class Scheduler:
    """The sequences that run and wait, and which of them are fed next.

    Sequences that run come first, those that decode before those whose prompt is fed.  Of those
    that wait, the next to run is of the adapter with the fewest that run (of two, the one that
    waited longer), so that a crowd of one adapter does not keep the others out.  Where blocks
    run out, the sequence that came last gives its own back and waits again.

    Args:
        cache: gives blocks.
        settings: of the engine.
    """

    def __init__(self, cache: AdapterCache, settings: EngineConfig) -> None:
        self._cache = cache
        self._settings = settings
        self._seats = Seats(settings.tier_limits.slots, settings.adapter_turn_steps)
        #: By request id, in the order in which they began to run.
        self.running: dict[str, Sequence] = {}
        self._waiting: dict[Adapter, deque[Sequence]] = {}
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self.running or self._waiting)

    def waiting(self) -> Iterator[Sequence]:
        """All that do not run.  Other threads may ask: copies are made at once."""
        for queue in tuple(self._waiting.values()):
            yield from tuple(queue)

    def add(self, sequence: Sequence) -> None:
        """It waits from now on."""
        self._waiting.setdefault(sequence.adapter, deque()).append(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """The sequence of a request, if it is here."""
        found = self.running.get(request_id)
        if found is not None:
            return found
        return next((s for s in self.waiting() if s.request_id == request_id), None)

    def remove(self, sequence: Sequence, *, scrub: bool = False) -> None:
        """It ends here.

        Args:
            sequence: that runs or waits.
            scrub: see `AdapterCache.free`.
        """
        if self.running.pop(sequence.request_id, None) is None:
            self._take(sequence)
        self._cache.free(sequence, scrub=scrub)

    def clear(self) -> None:
        """Forget all; their blocks stay taken."""
        self.running.clear()
        self._waiting.clear()

    def next(self) -> list[Share]:
        """What is fed next; empty where nothing can be.

        Those that decode come first.
        """
        seated = self._seats.choose(self._wanted())
        shares = self._shares_of_running(seated)
        self._admit(seated, shares)
        return sorted(shares, key=lambda share: not share.decodes)

    # --- inside ---------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, int]:
        leases = [s.lease for s in self.running.values()]
        leases += [queue[0].lease for queue in self._waiting.values()]
        return {lease.digest: lease.version.rank for lease in leases if lease is not None}

    def _shares_of_running(self, seated: frozenset[str]) -> list[Share]:
        shares: list[Share] = []
        left = self._settings.max_num_batched_tokens
        ordered = sorted(self.running.values(), key=lambda s: (s.pending != 1, s.arrived))
        for sequence in ordered:
            if sequence.request_id not in self.running or left == 0:
                continue
            if sequence.adapter is not None and sequence.adapter not in seated:
                continue
            tokens = min(sequence.pending, left)
            if self._reserve(sequence, tokens, shares):
                shares.append(Share(sequence, tokens))
                left -= tokens
        return shares

    def _reserve(self, sequence: Sequence, tokens: int, shares: list[Share]) -> bool:
        """Blocks for it, taken from those that came last if need be; False if it was last."""
        while not self._cache.reserve(sequence, tokens):
            scheduled = {share.sequence.request_id for share in shares}
            others = [s for s in self.running.values() if s.request_id not in scheduled]
            last = max(others, key=lambda s: s.arrived)
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.request_id]
        self._cache.free(sequence)
        self._waiting.setdefault(sequence.adapter, deque()).appendleft(sequence)
        self.preemptions += 1

    def _admit(self, seated: frozenset[str], shares: list[Share]) -> None:
        left = self._settings.max_num_batched_tokens - sum(share.tokens for share in shares)
        most = self._settings.max_num_seqs
        if left == 0 or len(self.running) >= most:
            return
        for sequence in self._by_turn(seated):
            if left == 0 or len(self.running) >= most:
                return
            if self._has_twin(sequence, shares):
                continue
            self._cache.adopt_prefix(sequence)
            tokens = min(sequence.pending, left)
            # A new one never takes blocks from those that run.
            if not self._cache.reserve(sequence, tokens):
                self._cache.free(sequence)
                return
            self._take(sequence)
            self.running[sequence.request_id] = sequence
            shares.append(Share(sequence, tokens))
            left -= tokens

    def _has_twin(self, sequence: Sequence, shares: list[Share]) -> bool:
        """Whether another one computes the same first block just now, to be shared afterwards."""
        size = self._settings.block_size
        if not self._cache.use_prefix_sharing or len(sequence.tokens) <= size:
            return False
        if sequence.hashes:
            return False
        first = sequence.tokens[:size]
        return any(
            share.tokens > 1
            and not share.sequence.hashes
            and share.sequence.adapter == sequence.adapter
            and share.sequence.tokens[:size] == first
            for share in shares
        )

    def _by_turn(self, seated: frozenset[str]) -> Iterator[Sequence]:
        """Those that wait, in the order in which they should begin."""
        counts: dict[Adapter, int] = {}
        for sequence in self.running.values():
            counts[sequence.adapter] = counts.get(sequence.adapter, 0) + 1
        heads = []
        for adapter, queue in self._waiting.items():
            if adapter is None or adapter in seated:
                # A copy: those that begin leave the queue meanwhile.
                line = iter(tuple(islice(queue, self._settings.max_num_seqs)))
                first = next(line)
                heads.append((counts.get(adapter, 0), first.arrived, first, line))
        heapq.heapify(heads)
        while heads:
            count, _, sequence, line = heapq.heappop(heads)
            yield sequence
            following = next(line, None)
            if following is not None:
                heapq.heappush(heads, (count + 1, following.arrived, following, line))

    def _take(self, sequence: Sequence) -> None:
        queue = self._waiting[sequence.adapter]
        queue.remove(sequence)
        if not queue:
            del self._waiting[sequence.adapter]
