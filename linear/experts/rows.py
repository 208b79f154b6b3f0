"""The rows of a batch as the experts of one layer see them: pair by pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..branching import RowLayout, refuse_misfit
from .pairs import Pairs


@dataclass(eq=False)
class PairRows:
    """Whose adapter each pair has.

    Attributes:
        batch: whose rows they are.
        pairs: who computes what.
    """

    batch: Batch
    pairs: Pairs

    @classmethod
    def of(
        cls, batch: Batch, pairs: Pairs, shape: torch.Size, subject: str, *, branched: bool
    ) -> PairRows:
        """The rows of `batch` in experts that are fed `shape` (T, K).

        Args:
            batch: in flight.
            pairs: of the forward.
            shape: of what the experts were handed.
            subject: the experts, for messages.
            branched: some adapter of the batch has a branch there; else nobody asks for slots.

        Raises:
            BatchError: they are not the batch's rows.
        """
        if not branched:
            return cls(batch, pairs)
        if batch.packed:
            batch = batch.fitting(shape)
        refuse_misfit(subject, RowLayout.FLAT, shape, batch)
        return cls(batch, pairs)

    def slots(self, place: int) -> torch.Tensor:
        """int32 (P,): the slot of each position's adapter in a place; -1 for none there."""
        return self.by_position(self.batch.slots_by_place[place])

    def by_position(self, by_row: torch.Tensor) -> torch.Tensor:
        """What each row of the batch has, (R,), by position, (P,)."""
        rows, tokens = by_row.shape[0], self.pairs.tokens
        each = tokens // max(rows, 1)
        row = (
            self.pairs.token
            if each <= 1
            else torch.div(self.pairs.token, each, rounding_mode="floor")
        )
        return by_row[row]
