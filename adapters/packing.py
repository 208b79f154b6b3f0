"""Packed batches: sequences of any lengths, one after the other in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..core.errors import BatchError
from ..linear.batch import Batch, BatchMemo, BatchPlan, MixedRows


@dataclass(frozen=True)
class Packing:
    """How the rows of a batch lie in one sequence.

    Attributes:
        tokens: of each row, how many; none for a row that is not there in this step.
        logits: places in the sequence of the tokens that the head is fed, in that order; None for
            all.
    """

    tokens: tuple[int, ...]
    logits: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[int] | None, logits: Sequence[int] | None, names: Sequence[object]
    ) -> Packing | None:
        """What a caller asked for; None where the rows are not packed.

        Args:
            tokens: see above.
            logits: see above.
            names: of the rows.

        Raises:
            BatchError: another number of rows, counts below 0, or places outside of the sequence.
        """
        if tokens is None:
            if logits is not None:
                reason = "places of the head's tokens are of packed rows"
                raise BatchError("rows(logits=...)", reason, "pass tokens= too")
            return None
        packing = cls(_integers("tokens", tokens), None)
        subject = f"rows(tokens={list(packing.tokens)})"
        rows = len(names)
        if len(packing.tokens) != rows or min(packing.tokens, default=0) < 0:
            reason = f"needs a count, 0 or more, for each of {rows} rows"
            raise BatchError(subject, reason, "pass how many tokens each row has")
        if logits is None:
            return packing
        places, total = _integers("logits", logits), sum(packing.tokens)
        outside = [place for place in places if not 0 <= place < total]
        if outside:
            reason = f"place {outside[0]} of logits lies outside of {total} tokens"
            raise BatchError(subject, reason, "count from 0 along the packed sequence")
        if len(places) == total and places != tuple(range(total)):
            reason = f"logits names all {total} tokens in another order, or some of them twice"
            raise BatchError(subject, reason, "name them in the order of the packed sequence")
        return replace(packing, logits=None if len(places) == total else places)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """What batches of one packing share.

    Attributes:
        rows: how many tokens.
        slots: int32 (places, rows).
        mixed: see `Batch.mixed`.
        memo: of all of them.
        selected: of the tokens that the head is fed; None where it is fed all.
    """

    rows: int
    slots: torch.Tensor
    mixed: tuple[MixedRows, ...]
    memo: BatchMemo
    selected: PackedRows | None

    @classmethod
    def of(cls, slots: torch.Tensor, mixed: Sequence[MixedRows], packing: Packing) -> PackedRows:
        """Spread rows over their tokens.

        Args:
            slots: int32 (places, rows).
            mixed: of the rows.
            packing: of the rows.
        """
        counts = torch.tensor(packing.tokens, dtype=torch.int64)
        row = torch.repeat_interleave(counts).to(slots.device)
        selected = None
        if packing.logits is not None:
            places = torch.tensor(packing.logits, dtype=torch.int64, device=slots.device)
            selected = cls._taken(slots, mixed, row[places], None)
        return cls._taken(slots, mixed, row, selected)

    @classmethod
    def _taken(
        cls,
        slots: torch.Tensor,
        mixed: Sequence[MixedRows],
        row: torch.Tensor,
        selected: PackedRows | None,
    ) -> PackedRows:
        spread = tuple(MixedRows(one.slots[:, row].contiguous(), one.weights[row]) for one in mixed)
        return cls(row.shape[0], slots[:, row].contiguous(), spread, BatchMemo(), selected)

    def begin(self, plan: BatchPlan) -> Batch:
        """A batch of its own for one block."""
        selected = None if self.selected is None else self.selected.begin(plan)
        return Batch(
            plan,
            self.rows,
            self.slots,
            self.memo,
            mixed=self.mixed,
            packed=True,
            selected=selected,
        )


def _integers(what: str, numbers: Sequence[int]) -> tuple[int, ...]:
    found = tuple(numbers)
    if not all(type(number) is int for number in found):
        raise BatchError(
            f"rows({what}={numbers!r})", "expected whole numbers", f"pass a list for {what}"
        )
    return found
