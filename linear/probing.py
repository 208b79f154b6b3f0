"""Whether this thread (or task) is at a probe: what it runs counts as no use of anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: What code of a model may raise when it is handed a probe it was not written for.
PROBE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)

_probing: ContextVar[bool] = ContextVar("branchline_probing", default=False)


def is_probing() -> bool:
    """Whether counters of what ran must stay as they are."""
    return _probing.get()


@contextmanager
def probing() -> Iterator[None]:
    """Inside, this thread (or task) runs nothing but probes."""
    token = _probing.set(True)
    try:
        yield
    finally:
        _probing.reset(token)
