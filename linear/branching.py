"""What a linear and the branches of its adapters tell each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from ..core.errors import BatchError
from ..core.quantized_activation import (
    QuantizedActivation,
    RawOutput,
    as_quantized_activation,
)
from .batch import Batch, FusionRules
from .outputs import Shrink


class RowLayout(StrEnum):
    """Where the rows of a batch lie in a layer's input; found by a recorded forward."""

    ROWS = "rows"
    FLAT = "flat"
    UNKNOWN = "unknown"


# Not frozen: there is one for every linear of every forward, and that would double its time.
@dataclass(eq=False, slots=True)
class BranchInput:
    """What a branch may read of a layer's input.

    Attributes:
        x: what reached the layer: the raw activation, or a producer's output.
        consumer: name of the layer.
        changed: (..., K), what the base was fed in its place; None where that was `x`.
    """

    x: torch.Tensor | QuantizedActivation
    consumer: str
    changed: torch.Tensor | None = None

    def raw(self) -> RawOutput:
        """The raw rows of the batch's adapters; other rows may be unwritten.

        Raises:
            RawConsumerError: there are only codes.
        """
        if isinstance(self.x, QuantizedActivation):
            return self.x.require_raw_rows(self.consumer)
        if self.x.dtype.itemsize == 1:
            as_quantized_activation(self.x, None, consumer=self.consumer)
        return RawOutput(self.x)

    def values(self) -> torch.Tensor:
        """`raw().values`."""
        x = self.x
        # The usual case, in every linear of every forward.
        if isinstance(x, torch.Tensor) and x.dtype.itemsize > 1:
            return x
        return self.raw().values

    def every_row(self) -> torch.Tensor:
        """(..., K): the raw activation, rows without an adapter included.

        Raises:
            RawConsumerError: there are only codes, or only the raw rows of some adapters.
        """
        if isinstance(self.x, QuantizedActivation):
            return self.x.require_raw(self.consumer)
        return self.values()

    def shrunk(self) -> torch.Tensor | None:
        """float32 (M, width): the shrunk rows, where the producer absorbed this layer's branch."""
        if isinstance(self.x, QuantizedActivation):
            return self.x.shrunk_for(self.consumer)
        return None


@dataclass(frozen=True, eq=False)
class BranchRows:
    """The rows of a batch as the branch of one place sees them.

    Attributes:
        slots: int32 (R,), the slot of each request; -1 for none, or for an adapter without a
            branch here.
        parts: all `Part`s of the batch's adapters here.
        batch: whose rows they are.
        index: of the place.
    """

    slots: torch.Tensor
    parts: int
    batch: Batch
    index: int

    @classmethod
    def at(cls, place: Place, batch: Batch) -> BranchRows:
        """The rows of a batch that names adapters, at `place`."""
        assert batch.slots is not None
        index = place.index
        found = batch.memo.rows.get(index)
        if found is None:
            slots, parts = batch.slots_by_place[index], batch.plan.parts[index]
            found = batch.memo.rows[index] = cls(slots, parts, batch, index)
        return found

    def of(self, slots: Container[int]) -> list[tuple[int | slice, int]]:
        """(request, slot) for each request whose adapter lies in one of `slots`.

        Of a packed batch, whose rows are tokens, a request is the slice of those in turn that have
        one slot.
        """
        by_row = self.batch.row_slots
        if not self.batch.packed:
            return [(row, slot) for row, slot in enumerate(by_row) if slot in slots]
        found: list[tuple[int | slice, int]] = []
        begin = 0
        for slot, run in itertools.groupby(by_row):
            end = begin + sum(1 for _ in run)
            if slot in slots:
                found.append((slice(begin, end), slot))
            begin = end
        return found


#: (M, N) of each linear with its branch, of their base outputs, which it may write to, and the
#: tensor that all of them read.
JointAdd = Callable[
    [Sequence[torch.Tensor], "torch.Tensor | QuantizedActivation"], Sequence[torch.Tensor]
]


class Branch(Protocol):
    """What all live adapters add to one linear.

    Attributes:
        join: what adds the branches of several linears that read one tensor in one go, where each
            is a plain product a row; made once a batch.  None where each is added alone.
        compact_raw: of a dual producer, take the raw rows of adapters alone, one after the other,
            and not in place.
    """

    compact_raw: bool
    join: Callable[[Sequence[Any], Sequence[BranchRows]], JointAdd] | None

    def change_input(self, x: BranchInput, rows: BranchRows) -> torch.Tensor:
        """(..., K): what the base is fed; rows whose adapter changes nothing keep their bytes.

        Asked only where `rows.parts` has a part that changes the input.
        """
        ...

    def add(self, out: torch.Tensor, x: BranchInput, rows: BranchRows) -> torch.Tensor:
        """`out` (M, N) with the branch of each row's adapter.

        The M rows belong to the R requests of `rows` in turn.  Where no part reads the raw
        activation, `x.raw()` is not asked for: the layer's site stays fused.
        """
        ...

    def shrink_request(self, slots: torch.Tensor, rank: int) -> Shrink:
        """What a producer has to multiply the raw activation with, to absorb this branch.

        Asked only of a branch all of whose holders have a `shrink_rank`; `rank` is the highest.
        """
        ...


class Place(Protocol):
    """Whatever takes adapters: a linear, an embedding, a norm.

    Attributes:
        name: full name in the model.
        index: its row of `Batch.slots`, and its entry in plans.
        branch: what all live adapters do there; None before the first.
    """

    name: str
    index: int
    branch: Any


class BatchSource(Protocol):
    """Where a layer asks for the batch in flight, and tells of its changes."""

    def advance(self, reason: str) -> None:
        """Something changed that plans are made from."""
        ...

    rules: FusionRules

    def current_batch(self) -> Batch:
        """The batch of this context, or the base batch."""
        ...


def refuse_misfit(subject: str, layout: RowLayout, shape: torch.Size, batch: Batch) -> None:
    """Refuse an input of `shape` that does not hold the rows of `batch` as `layout` says.

    Raises:
        BatchError: it has another number of rows.
    """
    rows = batch.rows
    if rows is None:
        return
    if batch.packed:
        fits = shape[:-1].numel() == rows
    elif layout == RowLayout.FLAT:
        # Any other number would be a selection of tokens, in which nobody knows whose each one is.
        _refuse_selection(subject, rows, shape, batch.row_tokens)
        return
    else:
        fits = shape[0] == rows
    if not fits:
        raise BatchError(
            subject,
            f"its input has shape {tuple(shape)} but the batch names {rows} "
            f"{'tokens' if batch.packed else 'rows'}",
            "say how many tokens each row has, and which of them the head is fed"
            if batch.packed
            else "name one adapter (or None) for every row of the batch",
        )


def _refuse_selection(subject: str, rows: int, shape: torch.Size, tokens: int | None) -> None:
    if tokens is None:
        raise BatchError(
            subject,
            f"its input, {tuple(shape)}, holds all tokens one after the other, and how many each "
            f"of the batch's {rows} rows has is not known",
            "call the served model itself, not a part of it",
        )
    if len(shape) != 2 or shape[0] != rows * tokens:
        raise BatchError(
            subject,
            f"its input has shape {tuple(shape)} but the model was called with {rows} rows of "
            f"{tokens} tokens: which of them belong to which row's adapter is not known",
            "leave this layer out of the adapter's targets, or run these inputs without an "
            "adapter on it",
        )
