"""One simulated replica: the engine's own scheduler, and a clock in the place of a model."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from ..engine.scheduler import Scheduler, Share
from ..serve_config import EngineConfig
from .slots import SimulatedAdapter, SimulatedSlots
from .trace import Trace, TracedRequest


@dataclass(frozen=True)
class StepLoad:
    """What is fed at once.

    Attributes:
        tokens: of all rows.
        adapter_tokens: of rows with an adapter.
        context: tokens in the caches that are looked back on.
        kinds: of the adapters, each once.
        adapters: how many different ones.
    """

    tokens: int
    adapter_tokens: int
    context: int
    kinds: frozenset[int]
    adapters: int


class StepClock(Protocol):
    """How long things take."""

    def step(self, load: StepLoad) -> float:
        """Seconds of one forward."""
        ...

    def base_step(self, load: StepLoad) -> float:
        """Seconds of the same forward, if no row had an adapter."""
        ...

    def load(self, adapter: SimulatedAdapter) -> float:
        """Seconds in which forwards wait for an adapter to be written into a slot."""
        ...


@dataclass
class ReplicaResult:
    """What one replica did.

    Attributes:
        hits: requests whose adapter had a slot at their first forward.
        misses: those whose adapter was given one.
        loads: adapters written into slots.
        stall_seconds: that forwards waited for that.
        seconds: from the first request to the last answer.
        busy_seconds: of forwards and stalls.
        base_seconds: of the same forwards without adapters.
        steps: forwards.
        tokens: made.
        first_token_seconds: of every request, from when it came.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    stall_seconds: float = 0.0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    base_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)


class _Version:
    def __init__(self, adapter: SimulatedAdapter) -> None:
        self.rank = adapter.rank


class _Lease:
    def __init__(self, adapter: SimulatedAdapter) -> None:
        self.digest = adapter.name
        self.version = _Version(adapter)


class _Sequence:
    """What the scheduler asks of a request."""

    def __init__(
        self, request: TracedRequest, number: int, adapter: SimulatedAdapter | None
    ) -> None:
        self.request = request
        self.request_id = str(number)
        self.arrived = number
        self.simulated = adapter
        self.adapter = None if adapter is None else adapter.name
        self.lease = None if adapter is None else _Lease(adapter)
        self.position = 0
        self.length = request.prompt
        self.made = 0
        self.came = 0.0
        self.started = False

    @property
    def pending(self) -> int:
        return self.length - self.position


class _Blocks:
    """A KV cache of so many blocks; nothing is shared."""

    use_prefix_sharing = False

    def __init__(self, blocks: int, size: int) -> None:
        self._free = blocks
        self._size = size
        self._held: dict[str, int] = {}

    def reserve(self, sequence: _Sequence, tokens: int) -> bool:
        held = self._held.get(sequence.request_id, 0)
        more = -(-(sequence.position + tokens) // self._size) - held
        if more > self._free:
            return False
        self._free -= max(0, more)
        self._held[sequence.request_id] = held + max(0, more)
        return True

    def free(self, sequence: _Sequence, *, scrub: bool = False) -> None:
        self._free += self._held.pop(sequence.request_id, 0)
        sequence.position = 0

    def adopt_prefix(self, sequence: _Sequence) -> None:
        pass


class Replica:
    """A replica of simulated requests.

    Args:
        config: of its engine.
        adapters: by name, all that its trace names.
        clock: how long things take.
        blocks: of the KV cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapters: dict[str, SimulatedAdapter],
        clock: StepClock,
        blocks: int,
    ) -> None:
        # What the scheduler asks of a cache and of sequences is all that these have.
        cache = cast(Any, _Blocks(blocks, config.block_size))
        self._scheduler = Scheduler(cache, config)
        self._slots = SimulatedSlots(config.tier_limits)
        self._adapters = adapters
        self._clock = clock
        self._now = 0.0
        self._number = 0
        self._result = ReplicaResult()

    def fill(self, adapters: Iterable[SimulatedAdapter]) -> None:
        """Give slots to adapters that were loaded before the first request."""
        for adapter in adapters:
            self._slots.place([adapter])

    def run(self, trace: Trace) -> ReplicaResult:
        """Answer all requests of a trace."""
        arrivals = _Arrivals(trace)
        while True:
            for request, came in arrivals.until(self._now):
                self._add(request, came)
            shares = self._scheduler.next()
            if shares:
                self._step(shares, arrivals)
            elif self._scheduler.has_work:
                # Whoever runs lost its seat, and nobody can begin: the next turn is for it.
                continue
            elif (following := arrivals.following) is None:
                break
            else:
                self._now = max(self._now, following)
        self._result.seconds = self._now
        return self._result

    def _add(self, request: TracedRequest, came: float) -> None:
        adapter = None if request.adapter is None else self._adapters[request.adapter]
        self._number += 1
        sequence = _Sequence(request, self._number, adapter)
        sequence.came = came
        self._scheduler.add(cast(Any, sequence))

    def _step(self, shares: list[Share], arrivals: _Arrivals) -> None:
        result = self._result
        sequences = cast(list[_Sequence], [share.sequence for share in shares])
        stall = self._place(sequences)
        load = _load_of(sequences, [share.tokens for share in shares])
        seconds, base = self._clock.step(load), self._clock.base_step(load)
        alike = self._alike(shares, sequences, arrivals, seconds)
        self._now += stall + alike * seconds
        result.steps += alike
        result.stall_seconds += stall
        result.busy_seconds += stall + alike * seconds
        result.base_seconds += alike * base
        for share, sequence in zip(shares, sequences, strict=True):
            sequence.position += share.tokens + (alike - 1)
            if sequence.pending == 0 or alike > 1:
                self._made(sequence, alike, arrivals)

    def _alike(
        self,
        shares: list[Share],
        sequences: list[_Sequence],
        arrivals: _Arrivals,
        seconds: float,
    ) -> int:
        """How many steps like this one follow each other: none may end or begin anything."""
        scheduler = self._scheduler
        if len(shares) < len(scheduler.running) or next(scheduler.waiting(), None) is not None:
            return 1
        if not all(share.decodes for share in shares):
            return 1
        most = min(s.request.output - s.made for s in sequences)
        following = arrivals.following
        if following is not None and seconds > 0:
            most = min(most, int((following - self._now) / seconds))
        return max(1, most)

    def _place(self, sequences: list[_Sequence]) -> float:
        result = self._result
        for sequence in sequences:
            if not sequence.started:
                sequence.started = True
                if sequence.simulated is not None:
                    in_slot = sequence.simulated.slot is not None
                    result.hits += in_slot
                    result.misses += not in_slot
        batch = dict.fromkeys(s.simulated for s in sequences if s.simulated is not None)
        loaded = self._slots.place(batch) if batch else []
        result.loads += len(loaded)
        return sum(self._clock.load(adapter) for adapter in loaded)

    def _made(self, sequence: _Sequence, tokens: int, arrivals: _Arrivals) -> None:
        if not sequence.made:
            self._result.first_token_seconds.append(self._now - sequence.came)
        sequence.made += tokens
        self._result.tokens += tokens
        # The token that was made is fed next.
        sequence.length = sequence.position + 1
        if sequence.made >= sequence.request.output:
            self._scheduler.remove(cast(Any, sequence))
            arrivals.answered(self._now)


class _Arrivals:
    """When requests come: at their times, or when a client has been answered."""

    def __init__(self, trace: Trace) -> None:
        self._left = iter(trace)
        self._next = next(self._left, None)
        self._clients = None if trace.clients is None else [0.0] * trace.clients

    @property
    def following(self) -> float | None:
        """When the next one comes; None where none does before another is answered."""
        if self._next is None or self._clients == []:
            return None
        return self._next.time if self._clients is None else self._clients[0]

    def until(self, now: float) -> Iterator[tuple[TracedRequest, float]]:
        """All that have come by `now`, and when."""
        while (time := self.following) is not None and time <= now:
            assert self._next is not None
            request, self._next = self._next, next(self._left, None)
            if self._clients is not None:
                heapq.heappop(self._clients)
            yield request, time

    def answered(self, now: float) -> None:
        """A client has its answer."""
        if self._clients is not None:
            heapq.heappush(self._clients, now)


def _load_of(sequences: list[_Sequence], tokens: list[int]) -> StepLoad:
    held = [s.simulated for s in sequences]
    return StepLoad(
        tokens=sum(tokens),
        adapter_tokens=sum(n for n, a in zip(tokens, held, strict=True) if a is not None),
        context=sum(sequence.position for sequence in sequences),
        kinds=frozenset(adapter.kind for adapter in held if adapter is not None),
        adapters=len({adapter for adapter in held if adapter is not None}),
    )
