"""One rank's share of an adapter, on a model whose linears are split over ranks.

Outputs split (column-parallel): A whole, the rows of B.  Inputs split (row-parallel): the columns
of A, B whole; each rank adds B (A_r x_r) to its partial sum, and the ranks' sum is B A x.  Gain and
rotation of the output are linear, so they act on each partial sum alike; a shift is added by the
first rank alone.  What embeddings and norms give is whole on every rank, and so are their parts.
Experts are split one by one: each rank keeps the products of its own.

Whether an adapter can be split is decided from shapes that all ranks see, so they decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from ..core.errors import AdapterUnsupportedError
from ..linear.experts.layer import ExpertsLinear
from ..linear.experts.shard import ExpertsShard
from ..linear.routed import RoutedLayer
from ..linear.sharded import LinearShard, ShardedLinear
from .weights import AdapterWeights, ExpertsWeights, LayerWeights, LowRank, RotationFactor


def own_share(
    name: str, weights: AdapterWeights, layers: Mapping[str, RoutedLayer]
) -> AdapterWeights:
    """What this rank keeps of an adapter; the digest stays that of the whole.

    Args:
        name: of the adapter, for messages.
        weights: of the whole model.
        layers: the model's linears, and projections of experts, by full name.

    Returns:
        `weights` itself where none of its linears and experts is split.

    Raises:
        AdapterUnsupportedError: a rotation mixes what lies on different ranks.
    """
    shares, experts = dict(weights.layers), dict(weights.experts)
    for place, parts in weights.layers.items():
        layer = layers[place]
        if isinstance(layer, ShardedLinear):
            shares[place] = _share(f"adapter '{name}'", place, parts, layer.shard)
    for place, parts in weights.experts.items():
        # A router is no layer, and whole on every rank.
        layer = layers.get(place)
        if isinstance(layer, ExpertsLinear) and layer.shard is not None:
            experts[place] = _own_experts(parts, layer.shard)
    own, whole = {**shares, **experts}, {**weights.layers, **weights.experts}
    if all(own[place] is parts for place, parts in whole.items()):
        return weights
    return replace(weights, layers=MappingProxyType(shares), experts=MappingProxyType(experts))


def _own_experts(parts: ExpertsWeights, shard: ExpertsShard) -> ExpertsWeights:
    # A half that all experts share has one entry, and stays.
    halves = (parts.a, parts.b)
    a, b = (half if half.shape[0] == 1 else _kept(half, shard.own, 0) for half in halves)
    return replace(parts, a=a, b=b)


def _share(subject: str, place: str, parts: LayerWeights, shard: LinearShard) -> LayerWeights:
    turned = "rotation" if shard.by_rows else "output_rotation"
    factors: tuple[RotationFactor, ...] = getattr(parts, turned)
    for factor in factors:
        _refuse_mixing(subject, place, factor, shard)
    own = {turned: tuple(_own_blocks(factor, shard) for factor in factors)}
    return replace(_by_rows(parts, shard) if shard.by_rows else _by_columns(parts, shard), **own)


def _by_columns(parts: LayerWeights, shard: LinearShard) -> LayerWeights:
    """Outputs split: whatever has one entry an output keeps this rank's."""
    own, product = shard.own, parts.low_rank
    return replace(
        parts,
        low_rank=product and LowRank(product.a, _kept(product.b, own, 0), product.scaling),
        gain=_optional(parts.gain, own, 0),
        shift=_optional(parts.shift, own, 0),
        delta=_optional(parts.delta, own, 0),
        weight=_optional(parts.weight, own, 0),
    )


def _by_rows(parts: LayerWeights, shard: LinearShard) -> LayerWeights:
    """Inputs split: whatever has one entry an input keeps this rank's."""
    own, product, shift = shard.own, parts.low_rank, parts.shift
    if shift is not None and shard.rank:
        # Not dropped: all ranks then hold the same parts, and plan alike.
        shift = torch.full_like(shift, -0.0)
    return replace(
        parts,
        low_rank=product and LowRank(_kept(product.a, own, 1), product.b, product.scaling),
        shift=shift,
        in_scale=_optional(parts.in_scale, own, 0),
        delta=_optional(parts.delta, own, 1),
        weight=_optional(parts.weight, own, 1),
    )


def _optional(tensor: torch.Tensor | None, own: slice, dim: int) -> torch.Tensor | None:
    return None if tensor is None else _kept(tensor, own, dim)


def _kept(tensor: torch.Tensor, own: slice, dim: int) -> torch.Tensor:
    # A copy: a view would keep the whole tensor in memory.
    part = tensor.narrow(dim, own.start, own.stop - own.start)
    return part.clone(memory_format=torch.contiguous_format)


def _refuse_mixing(subject: str, place: str, factor: RotationFactor, shard: LinearShard) -> None:
    size, edges = factor.blocks.shape[-1], shard.edges
    fits = all(edge % size == 0 for edge in edges)
    if fits and factor.order is not None:
        ranks = torch.tensor(edges[1:-1])
        home = torch.bucketize(torch.arange(edges[-1]), ranks, right=True)
        fits = torch.equal(home[factor.order], home)
    if not fits:
        what = "inputs" if shard.by_rows else "outputs"
        raise AdapterUnsupportedError(
            subject,
            f"its rotation (blocks of {size}) of the {what} of {place} mixes {what} that lie on "
            f"different ones of {len(edges) - 1} ranks",
            "serve it on a model that is not split over ranks, or merge it into the model",
        )


def _own_blocks(factor: RotationFactor, shard: LinearShard) -> RotationFactor:
    own, size = shard.own, factor.blocks.shape[-1]
    blocks = _kept(factor.blocks, slice(own.start // size, own.stop // size), 0)
    order = None if factor.order is None else factor.order[own] - own.start
    return RotationFactor(blocks, order)
