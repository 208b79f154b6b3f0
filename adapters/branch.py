"""LoRA branches of one linear, for all adapters at once: shrink, expand, add.

The eager definition.  Every row of the batch is multiplied with the matrices of its own slot, in
one batched product of a shape that depends on the batch's shape alone, so a row's bytes cannot
depend on its neighbours.  Rows without a branch keep the base bytes: they are selected, not added
to, since adding a zero would turn -0.0 into 0.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.errors import AdapterUnsupportedError, RawConsumerError
from .source import AdapterWeights, LoraWeights


class LoraSlots:
    """The stacked matrices of one linear: fixed addresses, one row a slot.

    Args:
        name: of the linear, for messages.
        slots: how many adapters fit.
        rank: the highest rank that fits; smaller ones are padded with zeros.
        in_features: K.
        out_features: N.
        dtype: of the matrices.
        device: of the matrices.
    """

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

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        self.scaling[slot] = 0.0

    def shrink(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`x` (rows, ..., K) times each row's A: float32 (rows, tokens, rank)."""
        rows = x.shape[0]
        return torch.bmm(x.reshape(rows, -1, x.shape[-1]).float(), self.a[index].float().mT)

    def expand(self, shrunk: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`shrunk` (rows, tokens, rank) times each row's B and scaling: float32 (..., N)."""
        delta = torch.bmm(shrunk, self.b[index].float().mT)
        return delta.mul_(self.scaling[index].view(-1, 1, 1))

    def add(
        self,
        out: torch.Tensor,
        raw: Callable[[], torch.Tensor],
        slots: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Add each masked row's branch.

        Args:
            out: (rows, ..., N), the base output.
            raw: gives the raw activation, (rows, ..., K).
            slots: int64 (rows,), -1 for none.
            mask: bool (rows,), whether the row's adapter has a branch here.

        Returns:
            (rows, ..., N) in the dtype of `out`: float32 accumulation, one rounding.

        Raises:
            RawConsumerError: there are only codes.
        """
        x = raw()
        if x.dtype.itemsize == 1:
            raise RawConsumerError(
                f"the adapter branch on '{self.name}'",
                f"was handed {x.dtype} codes instead of the raw activation",
                "route the layer's site unfused while an adapter is live",
            )
        index = torch.where(mask, slots, 0)
        # Autocast would round both products to half precision.
        with torch.autocast(x.device.type, enabled=False):
            delta = self.expand(self.shrink(x, index), index)
        wide = mask.view(-1, *[1] * (out.dim() - 1))
        return torch.where(wide, (out.float() + delta.view(out.shape)).to(out.dtype), out)


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
