"""Shares of an adapter: over all ranks they come to what the whole adapter does."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from branchline.adapters.shards import own_share
from branchline.adapters.weights import AdapterWeights, LayerWeights, RotationFactor
from branchline.core.errors import AdapterUnsupportedError
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.registry import LayerRegistry
from branchline.linear.routed import RoutedLinear
from branchline.linear.sharded import LinearShard, ShardedLinear, Split, even_edges
from tests.parts import Random
from tests.parts_reference import apply_parts

INPUTS, OUTPUTS, BLOCK = 24, 40, 4
NAME = "linear"


def rotation(columns: int, block: int = BLOCK, order: torch.Tensor | None = None) -> RotationFactor:
    return RotationFactor(Random(3).normal(columns // block, block, block, std=1.0), order)


def every_part() -> dict[str, Any]:
    random = Random(0)
    return {
        "low_rank": random.low_rank(INPUTS, OUTPUTS, 3),
        "gain": random.near_one(OUTPUTS),
        "shift": random.normal(OUTPUTS),
        "in_scale": random.near_one(INPUTS),
        "rotation": (rotation(INPUTS),),
        "delta": random.normal(OUTPUTS, INPUTS),
        "weight": random.normal(OUTPUTS, INPUTS),
        "output_rotation": (rotation(OUTPUTS), rotation(OUTPUTS)),
    }


def share(parts: LayerWeights, split: Split, rank: int, ranks: int) -> AdapterWeights:
    size = INPUTS if split == Split.ROW else OUTPUTS
    # Nothing is exchanged here.
    group = cast("Any", None)
    shard = LinearShard(split, rank, even_edges(size, ranks), group, OUTPUTS)
    kernel = FloatLinear(nn.Linear(INPUTS, OUTPUTS))
    layer = ShardedLinear(
        NAME, 0, kernel, LayerRegistry(), torch.float32, torch.device("cpu"), shard=shard
    )
    whole = AdapterWeights("memory", "digest", {NAME: parts})
    return own_share("a", whole, {NAME: layer})


def check(parts: LayerWeights, split: Split, ranks: int) -> None:
    random = Random(1)
    x, w, bias = random.normal(5, INPUTS), random.normal(OUTPUTS, INPUTS), random.normal(OUTPUTS)
    wanted = apply_parts(x, lambda fed: F.linear(fed, w, bias), parts)
    outs = []
    edges = even_edges(INPUTS if split == Split.ROW else OUTPUTS, ranks)
    for rank in range(ranks):
        own = share(parts, split, rank, ranks)
        assert own.digest == "digest"
        kept, at = own.layers[NAME], slice(edges[rank], edges[rank + 1])
        if split == Split.ROW:
            base = partial(F.linear, weight=w[:, at], bias=None if rank else bias)
            outs.append(apply_parts(x[:, at], base, kept))
        else:
            outs.append(apply_parts(x, partial(F.linear, weight=w[at], bias=bias[at]), kept))
        assert kept.parts == parts.parts
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in own.tensors if t.numel())
    found = sum(outs) if split == Split.ROW else torch.cat(outs, -1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("split", [Split.COLUMN, Split.ROW])
@pytest.mark.parametrize("part", list(every_part()))
def test_each_part_alone(part, split, ranks):
    # Three ranks cut 40 outputs into 14, 14 and 12, which no block of four fits.
    block = 2 if ranks == 3 else BLOCK
    value = every_part()[part]
    if part.endswith("rotation"):
        value = (rotation(INPUTS if part == "rotation" else OUTPUTS, block),)
    check(LayerWeights(**{part: value}), split, ranks)


@pytest.mark.parametrize("split", [Split.COLUMN, Split.ROW, Split.GATHERED])
def test_all_parts_at_once(split):
    check(LayerWeights(**every_part()), split, 2)


@pytest.mark.parametrize(
    ("split", "part"), [(Split.ROW, "rotation"), (Split.COLUMN, "output_rotation")]
)
def test_a_rotation_across_ranks_is_refused_on_all_of_them(split, part):
    columns = INPUTS if split == Split.ROW else OUTPUTS
    inside = torch.cat([torch.arange(columns // 2).flip(0), torch.arange(columns // 2, columns)])
    across = torch.arange(columns).flip(0)
    check(LayerWeights(**{part: (rotation(columns, order=inside),)}), split, 2)
    for bad in (rotation(columns, columns), rotation(columns, order=across)):
        for rank in range(2):
            with pytest.raises(AdapterUnsupportedError, match=f"of {NAME} mixes .* of 2 ranks"):
                share(LayerWeights(**{part: (bad,)}), split, rank, 2)


def test_what_is_not_split_is_left_alone():
    whole = AdapterWeights("memory", "digest", {NAME: LayerWeights(**every_part())})
    kernel, device = FloatLinear(nn.Linear(INPUTS, OUTPUTS)), torch.device("cpu")
    layer = RoutedLinear(NAME, 0, kernel, LayerRegistry(), torch.float32, device)
    assert own_share("a", whole, {NAME: layer}) is whole
