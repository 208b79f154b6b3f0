"""LoRA branches of one linear, for all adapters at once: shrink, expand, add.

The shrink is `linear/shrink.py`, one definition for the branch and for producers that absorb it.
The expand multiplies every row with the matrix of its own slot, in one batched product of a shape
that depends on the batch's shape alone, so a row's bytes cannot depend on its neighbours.  Rows
without a branch keep the base bytes: they are selected, not added to, since adding a zero would
turn -0.0 into 0.0.
"""

from __future__ import annotations

import torch

from ..core.errors import AdapterUnsupportedError
from ..linear.outputs import Shrink
from ..linear.routed import BranchInput
from ..linear.shrink import shrink
from .source import AdapterWeights, LoraWeights


class LoraSlots:
    """The stacked matrices of one linear: fixed addresses, one row a slot.

    A branch reads raw rows in place (`compact_raw`): those it has no slot for cost it nothing.

    Args:
        name: of the linear, for messages.
        slots: how many adapters fit.
        rank: the highest rank that fits; smaller ones are padded with zeros.
        in_features: K.
        out_features: N.
        dtype: of the matrices.
        device: of the matrices.
    """

    compact_raw = False

    def __init__(
        self,
        name: str,
        slots: int,
        rank: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.a = torch.zeros(slots, rank, in_features, dtype=dtype, device=device)
        self.b = torch.zeros(slots, out_features, rank, dtype=dtype, device=device)
        self.scaling = torch.zeros(slots, dtype=torch.float32, device=device)
        self.ranks = torch.zeros(slots, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory of the stacks."""
        return self.a.nbytes + self.b.nbytes

    def write(self, slot: int, weights: LoraWeights) -> None:
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


def check_range(name: str, weights: AdapterWeights, dtype: torch.dtype) -> None:
    """Refuse an adapter whose values the slots cannot hold.

    Args:
        name: of the adapter, for messages.
        weights: as read.
        dtype: of the slots.

    Raises:
        AdapterUnsupportedError: a scaling beyond float32, or a weight beyond `dtype`.
    """
    for layer, lora in weights.layers.items():
        if abs(lora.scaling) > torch.finfo(torch.float32).max:
            raise AdapterUnsupportedError(
                f"adapter '{name}'",
                f"the scaling {lora.scaling:g} of {layer} is beyond float32",
                "correct lora_alpha in its config",
            )
        for what, tensor in (("lora_A", lora.a), ("lora_B", lora.b)):
            if bool(tensor.to(dtype).isfinite().all()):
                continue
            raise AdapterUnsupportedError(
                f"adapter '{name}'",
                f"{what} of {layer} holds values beyond the {dtype} of the slots",
                "wrap with lora_dtype='float32' (command line: --lora-dtype float32)",
            )
