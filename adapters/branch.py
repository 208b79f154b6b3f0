"""What all adapters in slots do to one linear: each part's stack, and how the parts add up."""

from __future__ import annotations

import torch

from ..core.errors import AdapterUnsupportedError
from ..linear.outputs import Shrink
from ..linear.routed import BranchInput
from .low_rank import LowRankSlots
from .slots import SlotClasses
from .weights import AdapterWeights, LayerWeights


class LayerBranch:
    """The branch of one linear; stacks of a part exist from the first adapter on that has it.

    A branch reads raw rows in place (`compact_raw`): those it has no slot for cost it nothing.

    Args:
        name: of the linear, for messages.
        slots: of the model.
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
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.low_rank = LowRankSlots(name, slots, in_features, out_features, dtype, device)

    @property
    def nbytes(self) -> int:
        """Device memory of the stacks."""
        return self.low_rank.nbytes

    def write(self, slot: int, weights: LayerWeights) -> None:
        """Fill a slot; nothing of what was there before is left."""
        assert weights.low_rank is not None
        self.low_rank.write(slot, weights.low_rank)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.low_rank.clear(slot)

    def shrink_request(self, slots: torch.Tensor, rank: int) -> Shrink:
        """What shrinks the raw activation for rows of `slots` (int32 (R,), -1 for none)."""
        return self.low_rank.shrink_request(slots, rank)

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
        return self.low_rank.add(out, x, slots)


def check_range(name: str, weights: AdapterWeights, dtype: torch.dtype) -> None:
    """Refuse an adapter whose values the slots cannot hold.

    Args:
        name: of the adapter, for messages.
        weights: as read.
        dtype: of the slots.

    Raises:
        AdapterUnsupportedError: a scaling beyond float32, or a weight beyond `dtype`.
    """
    for layer, parts in weights.layers.items():
        part = parts.low_rank
        if part is None:
            continue
        if abs(part.scaling) > torch.finfo(torch.float32).max:
            raise AdapterUnsupportedError(
                f"adapter '{name}'",
                f"the scaling {part.scaling:g} of {layer} is beyond float32",
                "correct lora_alpha in its config",
            )
        for what, tensor in (("lora_A", part.a), ("lora_B", part.b)):
            if bool(tensor.to(dtype).isfinite().all()):
                continue
            raise AdapterUnsupportedError(
                f"adapter '{name}'",
                f"{what} of {layer} holds values beyond the {dtype} of the slots",
                "wrap with lora_dtype='float32' (command line: --lora-dtype float32)",
            )
