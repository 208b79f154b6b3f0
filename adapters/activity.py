"""What happened to the adapters of a served model so far: operations, their time, evictions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from ..core.errors import BranchlineError


class Operation(StrEnum):
    """What was done with one adapter.

    `load`, `swap` and `unload` are the manager's; a reload counts as a swap.  `read`: a source was
    read for the first use of a registered name, or again because host memory had let it go.
    """

    LOAD = "load"
    SWAP = "swap"
    UNLOAD = "unload"
    READ = "read"


#: The outcome of an operation that raised nothing; else it is the name of the error's class, or
#: "error" for one that is none of this package's.
OK = "ok"


@dataclass(frozen=True)
class OperationCount:
    """How often an operation ended so, and how long that took.

    Attributes:
        count: ended operations.
        seconds: of all of them together.
    """

    count: int
    seconds: float


@dataclass(frozen=True)
class AdapterCounters:
    """What happened since the model was wrapped.

    Attributes:
        operations: by operation and outcome (`OK`, or the error's class).
        slot_loads: adapters that were written into a slot, and how long that took.
        slot_evictions: adapters that lost their slot to another one.
        host_evictions: copies that host memory let go.
    """

    operations: Mapping[tuple[Operation, str], OperationCount]
    slot_loads: OperationCount
    slot_evictions: int
    host_evictions: int


class OperationLog:
    """Counts operations and their time; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Operation, str]] = Counter()
        self._seconds: dict[tuple[Operation, str], float] = {}

    @contextmanager
    def timed(self, operation: Operation) -> Iterator[None]:
        """Count what runs inside as one operation; an error of ours is its outcome, and goes on."""
        # What raises another error than ours is a bug, and counted as such.
        began, outcome = time.perf_counter(), "error"
        try:
            yield
            outcome = OK
        except BranchlineError as error:
            outcome = type(error).__name__
            raise
        finally:
            seconds = time.perf_counter() - began
            with self._lock:
                self._counts[operation, outcome] += 1
                self._seconds[operation, outcome] = (
                    self._seconds.get((operation, outcome), 0.0) + seconds
                )

    def counts(self) -> Mapping[tuple[Operation, str], OperationCount]:
        """What was counted so far."""
        with self._lock:
            return MappingProxyType(
                {
                    key: OperationCount(count, self._seconds[key])
                    for key, count in self._counts.items()
                }
            )
