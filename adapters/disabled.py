"""Where a model serves the base, whatever rows name: the calls of one thread or task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_DISABLED: ContextVar[frozenset[int]] = ContextVar("branchline_disabled", default=frozenset())


def is_disabled(owner: int) -> bool:
    """Whether the adapters of the model `owner` are off in this context."""
    return owner in _DISABLED.get()


@contextmanager
def disabled(owner: int) -> Iterator[None]:
    """Switch the adapters of the model `owner` off, for what is called inside."""
    before = _DISABLED.get()
    _DISABLED.set(before | {owner})
    try:
        yield
    finally:
        # Not `reset`: a generator may leave in another context than it entered.
        _DISABLED.set(_DISABLED.get() - ({owner} - before))
