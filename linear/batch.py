"""The batch in flight: which row uses which slot, and the ready plan that its layers obey.

The choice belongs to the batch, not to the model: it travels in a context variable, so two
threads (or two tasks) with two batches of one model never see each other's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch


class BatchPlan(Protocol):
    """What layers and sites read of a plan: ready-made integers, no decisions."""

    @property
    def routes(self) -> tuple[int, ...]:
        """Route by site index."""
        ...

    @property
    def branched(self) -> tuple[bool, ...]:
        """By layer index: whether some adapter of the batch has a branch there."""
        ...

    @property
    def shrink_ranks(self) -> tuple[int, ...]:
        """By layer index: the highest rank of the batch's LoRA branches there; 0 for none."""
        ...


@dataclass(frozen=True)
class BarePlan:
    """A plan of nothing but integers: what a model is run by while it is being wrapped."""

    routes: tuple[int, ...]
    branched: tuple[bool, ...]
    shrink_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class FusionRules:
    """What a model was wrapped with, for code that fuses by hand.

    Attributes:
        never_fused: a layer that may ever carry an adapter is never fed codes (policy "static").
        producer: the only producer that may be chosen; None for any.
        shrink_width: the rank that a slot holds, where sites may absorb LoRA branches; else 0.
    """

    never_fused: bool = False
    producer: str | None = None
    shrink_width: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of one model.

    Attributes:
        plan: the frozen plan for the adapters of this batch.
        rows: number of rows, or None for a batch of base rows only (any number of rows).
        slots: int32 (layers, rows), the slot of each row on each layer; -1 where the row has no
            adapter, or one without a branch there.  None where `rows` is None.
        memo: what sites have worked out for this batch, by their index; the same for all of its
            forwards.
        ended: set when its block has ended; nothing may run under it any more, for its slots may
            be another adapter's by then.
    """

    plan: BatchPlan
    rows: int | None = None
    slots: torch.Tensor | None = None
    memo: dict[int, Any] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)


_active: ContextVar[Mapping[int, Batch]] = ContextVar(
    "branchline_batches", default=MappingProxyType({})
)


def active_batch(owner: int) -> Batch | None:
    """The batch in flight of the model `owner` in this context, if any."""
    return _active.get().get(owner)


@contextmanager
def batch_scope(owner: int, batch: Batch) -> Iterator[None]:
    """Make `batch` the one in flight of `owner`; afterwards it is the one from before.

    Blocks may end in another order than they began (generators do that): only the block whose
    batch is in flight puts another in its place, and never one that has ended.
    """
    before = _active.get()
    _active.set(MappingProxyType({**before, owner: batch}))
    try:
        yield
    finally:
        now = dict(_active.get())
        if now.get(owner) is batch:
            del now[owner]
            earlier = before.get(owner)
            if earlier is not None and not earlier.ended.is_set():
                now[owner] = earlier
            _active.set(MappingProxyType(now))
