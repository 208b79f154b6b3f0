"""The base's own weights on a model whose linears are split over ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ...linear.base_weights import BaseWeightsOf
from ...linear.registry import LayerRegistry
from ...linear.sharded import ShardedLinear, even_edges
from .ranks import Ranks


class SplitBaseWeights(BaseWeightsOf):
    """Puts the ranks' parts together, whenever an adapter is lowered that needs them (DoRA).

    All ranks lower the same adapters in the same order.  What they get is the same on all, so that
    the adapter's digest is; where weights are quantised it differs from that of one rank alone,
    whose scales span more.

    Args:
        model: whose linears are routed.
        registry: of its linears.
        ranks: of the replica.
    """

    def __init__(self, model: nn.Module, registry: LayerRegistry, ranks: Ranks) -> None:
        super().__init__(model, registry)
        self._layers = registry.layers
        self._ranks = ranks

    def weight(self, name: str) -> torch.Tensor:
        """As `BaseWeightsOf.weight`, of the whole linear.

        Raises:
            RankError: the ranks do not ask for the same.
        """
        layer = self._layers.get(name)
        if layer is None:
            return self._table(name)
        own = super().weight(name)
        if not isinstance(layer, ShardedLinear):
            return own
        dim = 1 if layer.shard.by_rows else 0
        return self._ranks.gather(f"the weight of '{name}'", own, dim, layer.shard.edges)

    def _table(self, name: str) -> torch.Tensor:
        table = self._model.get_submodule(name).weight
        if not isinstance(table, DTensor):
            return super().weight(name)
        (placed,) = table.placements
        assert isinstance(placed, Shard)
        own = table.to_local().detach().to("cpu", torch.float32, copy=True)
        edges = even_edges(table.shape[placed.dim], self._ranks.count)
        return self._ranks.gather(f"the table of '{name}'", own, placed.dim, edges)

    def bias(self, name: str) -> torch.Tensor | None:
        """As `BaseWeightsOf.bias`, of the whole linear.

        Raises:
            RankError: the ranks do not ask for the same.
        """
        own, layer = super().bias(name), self._layers[name]
        if not isinstance(layer, ShardedLinear):
            return own
        if layer.shard.by_rows:
            return self._ranks.told_by_all(own)[0]
        if own is None:
            return None
        return self._ranks.gather(f"the bias of '{name}'", own, 0, layer.shard.edges)
