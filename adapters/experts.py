"""What all adapters in slots do to one projection of experts: pair by pair, each by its expert.

Every slot holds a product for each expert.  To the kernels of low-rank products these are slots of
their own, `slot * E + expert`, and every pair of a token and an expert is a request of one row: so
one shrink and one expand serve all experts and all adapters of a batch.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch

from ..linear.branching import BranchInput
from ..linear.experts.rows import PairRows
from ..linear.outputs import Shrink
from ..linear.shrink import shrink
from .low_rank import LowRankSlots
from .slots import SlotClasses
from .weights import ExpertsWeights


class ExpertsBranch:
    """The branch of one projection of experts; its stacks exist from the first adapter on.

    A half that an adapter's experts share is written once for each of them: kernels find both
    halves of a slot in the same rows.

    Args:
        name: of the projection, for messages.
        slots: of the model.
        experts: E.
        in_features: K.
        out_features: N.
        dtype: of the matrices.
        device: of the stacks.
    """

    compact_raw = False

    def __init__(
        self,
        name: str,
        slots: SlotClasses,
        experts: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.experts = experts
        self._slots = slots
        self._sizes = (in_features, out_features)
        self._dtype = dtype
        self._device = device
        # Slots may be written by several threads: the stacks are made once.
        self._making = threading.Lock()
        self._low_rank: LowRankSlots | None = None

    # --- slots ----------------------------------------------------------------------------------

    @property
    def low_rank(self) -> LowRankSlots:
        """The stacks of all experts' matrices, made when they are first asked for."""
        with self._making:
            if self._low_rank is None:
                self._low_rank = LowRankSlots(
                    self.name,
                    _expert_slots(self._slots, self.experts),
                    *self._sizes,
                    self._dtype,
                    self._device,
                )
            return self._low_rank

    @property
    def product(self) -> LowRankSlots | None:
        """The stacks of all experts' matrices, if an adapter has needed them."""
        return self._low_rank

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return 0 if self._low_rank is None else self._low_rank.nbytes

    def write(self, slot: int, weights: ExpertsWeights) -> None:
        """Fill a slot; nothing of what was there before is left."""
        number = self.experts
        a = weights.a.expand(number, -1, -1)
        b = weights.b.expand(number, -1, -1)
        self.low_rank.write_run(slot * number, a, b, weights.scaling)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        if self._low_rank is not None:
            self._low_rank.clear(slot * self.experts, self.experts)

    # --- forward --------------------------------------------------------------------------------

    def add(self, out: torch.Tensor, x: BranchInput, rows: PairRows, place: int) -> torch.Tensor:
        """The branch of each pair whose token has an adapter here.

        Args:
            out: (P, N), the base output by position; may be written to.
            x: the rows that the pairs read, by position, (P, K): raw, or shrunk by their producer.
            rows: whose adapter each pair has.
            place: index of the projection.

        Returns:
            (P, N) in the dtype of `out`: float32 accumulation, one rounding; pairs without an
            adapter keep their bytes.

        Raises:
            RawConsumerError: there are only codes.
        """
        slots = self._by_expert(rows.slots(place), rows)
        out = self.low_rank.add(out, x, slots)
        return self._mix(out, x, rows, place) if rows.batch.mixed else out

    def shrink_request(self, rows: PairRows, place: int, rank: int) -> Shrink:
        """What shrinks the raw activation (P, K) of the pairs, by position."""
        slots = self._by_expert(rows.slots(place), rows)
        return self.low_rank.shrink_request(slots, rank)

    def _mix(self, out: torch.Tensor, x: BranchInput, rows: PairRows, place: int) -> torch.Tensor:
        """Pairs of tokens that take several adapters: the weighted sum, rounded once."""
        total = out.float()
        taken = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
        # Autocast would round products to half precision.
        with torch.autocast(out.device.type, enabled=False):
            for mixed in rows.batch.mixed:
                slots = self._by_expert(rows.by_position(mixed.slots[place]), rows)
                weights = rows.by_position(mixed.weights).unsqueeze(1)
                total = total + self._product(x, slots) * weights
                taken |= slots >= 0
        return torch.where(taken.unsqueeze(1), total.to(out.dtype), out)

    def _product(self, x: BranchInput, slots: torch.Tensor) -> torch.Tensor:
        shrunk = x.shrunk()
        if shrunk is None:
            request = self.low_rank.shrink_request(slots, self._slots.width)
            shrunk = shrink(x.values(), request)
        return self.low_rank.expand(shrunk, slots)

    def _by_expert(self, slots: torch.Tensor, rows: PairRows) -> torch.Tensor:
        """int32 (P,): `slots`, by position, as the stacks number them; -1 for no product."""
        pairs, tokens = rows.pairs, rows.batch.tokens
        held = slots >= 0
        if pairs.partial:
            held &= pairs.expert < pairs.experts
        if tokens is not None:
            each = pairs.tokens // max(rows.batch.rows or 1, 1)
            held &= tokens.mask(each, slots.device).flatten()[pairs.token]
        return torch.where(held, slots * self.experts + pairs.expert, -1)


@lru_cache(maxsize=16)
def _expert_slots(slots: SlotClasses, experts: int) -> SlotClasses:
    return SlotClasses(tuple(rank for rank in slots.ranks for _ in range(experts)))
