"""The low-rank part of a linear's branch, for all adapters at once: shrink, expand, add.

The shrink is `linear/shrink.py`, one definition for the branch and for producers that absorb it.
The expand multiplies every row with the matrix of its own slot, in one batched product of a shape
that depends on the batch's shape alone, so a row's bytes cannot depend on its neighbours.  Rows
without a branch keep the base bytes: they are selected, not added to, since adding a zero would
turn -0.0 into 0.0.
"""

from __future__ import annotations

import torch

from ..linear.outputs import Shrink
from ..linear.routed import BranchInput
from ..linear.shrink import shrink
from .slots import SlotClasses
from .weights import LowRank


class LowRankSlots:
    """The stacked matrices of one linear: fixed addresses, one row a slot.

    Args:
        name: of the linear, for messages.
        slots: of the model.
        in_features: K.
        out_features: N.
        dtype: of the matrices.
        device: of the matrices.
    """

    def __init__(
        self,
        name: str,
        slots: SlotClasses,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.a = torch.zeros(len(slots), slots.width, in_features, dtype=dtype, device=device)
        self.b = torch.zeros(len(slots), out_features, slots.width, dtype=dtype, device=device)
        self.scaling = torch.zeros(len(slots), dtype=torch.float32, device=device)
        self.ranks = torch.zeros(len(slots), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory of the stacks."""
        return self.a.nbytes + self.b.nbytes

    def write(self, slot: int, weights: LowRank) -> None:
        """Fill a slot; what a higher rank left behind is overwritten with zeros."""
        rank = weights.rank
        self.a[slot, :rank].copy_(weights.a)
        self.a[slot, rank:].zero_()
        self.b[slot, :, :rank].copy_(weights.b)
        self.b[slot, :, rank:].zero_()
        self.scaling[slot] = weights.scaling
        self.ranks[slot] = rank

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        self.scaling[slot] = 0.0
        self.ranks[slot] = 0

    def shrink_request(self, slots: torch.Tensor, rank: int) -> Shrink:
        """What shrinks the raw activation for rows of `slots` (int32 (R,), -1 for none)."""
        return Shrink(self.name, self.a, self.ranks, slots, rank)

    def expand(self, shrunk: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`shrunk` (M, rank) times each row's B and scaling: float32 (M, N)."""
        index = slots.clamp(min=0)
        by_request = shrunk.view(slots.shape[0], -1, shrunk.shape[-1])
        delta = torch.bmm(by_request, self.b[index].float().mT)
        return delta.mul_(self.scaling[index].view(-1, 1, 1)).flatten(0, 1)

    def add(self, out: torch.Tensor, x: BranchInput, slots: torch.Tensor) -> torch.Tensor:
        """Add the branch of each row that has one.

        Args:
            out: (M, N), the base output.
            x: the layer's input, (M, K): raw, or shrunk by its producer.
            slots: int32 (R,), -1 for none; the M rows belong to R requests in turn.

        Returns:
            (M, N) in the dtype of `out`: float32 accumulation, one rounding.

        Raises:
            RawConsumerError: there are only codes.
        """
        shrunk = x.shrunk()
        if shrunk is None:
            shrunk = shrink(x.raw().values, self.shrink_request(slots, self.a.shape[1]))
        # Autocast would round the product to half precision.
        with torch.autocast(out.device.type, enabled=False):
            delta = self.expand(shrunk, slots)
        wide = (slots >= 0).repeat_interleave(out.shape[0] // slots.shape[0]).unsqueeze(1)
        return torch.where(wide, (out.float() + delta).to(out.dtype), out)
