"""The branch of a router: a LoRA product on the scores, from PEFT's `target_parameters`."""

from __future__ import annotations

from .branch import LayerBranch
from .weights import ExpertsWeights, LayerWeights, LowRank


class RouterBranch(LayerBranch):
    """As of a linear; what it is given are the products of a parameter for one expert."""

    def write(self, slot: int, weights: LayerWeights | ExpertsWeights) -> None:
        """Fill a slot; nothing of what was there before is left."""
        if isinstance(weights, ExpertsWeights):
            (a,), (b,) = weights.a, weights.b
            weights = LayerWeights(low_rank=LowRank(a, b, weights.scaling))
        super().write(slot, weights)
