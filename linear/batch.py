"""The batch in flight: which row uses which slot, and the ready plan that its layers obey.

The choice belongs to the batch, not to the model: it travels in a context variable, so two
threads (or two tasks) with two batches of one model never see each other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
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
    def parts(self) -> tuple[int, ...]:
        """By layer index: all `Part`s of the batch's adapters there; 0 for none."""
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
    parts: tuple[int, ...] = ()
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


class Flag:
    """Set once and for all; many times cheaper than an event that nobody waits for."""

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """From now on `is_set`."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._is_set


class TokenMask(Protocol):
    """On which tokens of its rows the adapters of a batch act."""

    def mask(self, tokens: int, device: torch.device) -> torch.Tensor:
        """bool (rows * tokens, 1)."""
        ...


@dataclass(frozen=True, eq=False)
class MixedRows:
    """One adapter of every row that takes several, whose branches are added with weights.

    Attributes:
        slots: int32 (places, rows); -1 as in `Batch.slots`, and in rows that take no mixture.
        weights: float32 (rows,).
    """

    slots: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, eq=False)
class BatchMemo:
    """What is worked out once for all batches of the same rows under the same plan.

    Attributes:
        sites: what sites emit, by their index.
        rows: what branches see of the rows, by the index of their place.
        together: who is computed with a linear in one go, by its index.
    """

    sites: dict[int, Any] = field(default_factory=dict)
    rows: dict[int, Any] = field(default_factory=dict)
    together: dict[int, Any] = field(default_factory=dict)


# Not frozen, though nobody changes it: there is one for every step, and that would double its time.
@dataclass(eq=False)
class Batch:
    """One batch of one model.

    Attributes:
        plan: the frozen plan for the adapters of this batch.
        rows: number of rows, or None for a batch of base rows only (any number of rows).
        slots: int32 (places, rows), the slot of each row in each place that takes adapters (the
            linears first, in the order of their index); -1 where the row has no adapter, or one
            without a branch there.  None where `rows` is None.
        memo: what follows from the plan, the slots and the mixtures.
        ready: outputs of linears that were computed before they were called, by the index of the
            first of those that are computed together.
        mixed: what rows of mixtures take, adapter by adapter; -1 in `slots`.
        tokens: on which tokens adapters act; None for all.
        packed: the sequences lie one after the other in one, whatever their lengths: each token is
            a row of its own, and `rows` counts tokens.
        selected: of a packed batch, the tokens that the head is fed, where those are not all.
        row_tokens: of a batch that is not packed, how many tokens each row has in the forward that
            runs, as the model's entry saw it; None before that.
        ended: set when its block has ended; nothing may run under it any more, for its slots may
            be another adapter's by then.
    """

    plan: BatchPlan
    rows: int | None = None
    slots: torch.Tensor | None = None
    memo: BatchMemo = field(default_factory=BatchMemo)
    ready: dict[int, Any] = field(default_factory=dict)
    mixed: tuple[MixedRows, ...] = ()
    tokens: TokenMask | None = None
    ended: Flag = field(default_factory=Flag)
    packed: bool = False
    selected: Batch | None = None
    row_tokens: int | None = None

    def fitting(self, shape: torch.Size) -> Batch:
        """What an input (..., K) holds: all tokens of a packed batch, or the selected ones."""
        selected = self.selected
        if selected is None or shape[:-1].numel() == self.rows:
            return self
        return selected

    @cached_property
    def slots_by_place(self) -> tuple[torch.Tensor, ...]:
        """The rows of `slots`, cut once: every linear of every forward asks for its own."""
        return () if self.slots is None else self.slots.unbind(0)

    @cached_property
    def row_slots(self) -> tuple[int, ...]:
        """By row, the slot of its adapter, -1 for none; asking waits for the device, once."""
        return () if self.slots is None else tuple(self.slots.amax(0).tolist())


_active: ContextVar[Mapping[int, Batch]] = ContextVar(
    "branchline_batches", default=MappingProxyType({})
)


def active_batch(owner: int) -> Batch | None:
    """The batch in flight of the model `owner` in this context, if any."""
    return _active.get().get(owner)


class BatchScope:
    """Make `batch` the one in flight of `owner`; afterwards it is the one from before.

    Blocks may end in another order than they began (generators do that): only the block whose
    batch is in flight puts another in its place, and never one that has ended.  A class, since a
    generator would cost more than what it does.
    """

    __slots__ = ("_batch", "_before", "_owner")

    def __init__(self, owner: int, batch: Batch) -> None:
        self._owner = owner
        self._batch = batch

    def __enter__(self) -> None:
        self._before = before = _active.get()
        _active.set(MappingProxyType({**before, self._owner: self._batch}))

    def __exit__(self, *raised: object) -> None:
        owner, now = self._owner, dict(_active.get())
        if now.get(owner) is not self._batch:
            return
        del now[owner]
        earlier = self._before.get(owner)
        if earlier is not None and not earlier.ended.is_set():
            now[owner] = earlier
        _active.set(MappingProxyType(now))
