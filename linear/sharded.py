"""A linear whose weight is split over the ranks of a group: one rank's part of it.

Column-parallel: each rank has some of the outputs, and takes the whole input.  Row-parallel: each
rank has some of the inputs, and the ranks' products are partial sums of the whole output.  Whatever
is linear in the output may be done on each rank before the sums are added up: that is what adapters
do (see `adapters/shards.py`).  The terms and the two splits are those of Shoeybi et al.,
"Megatron-LM" (2019), section 3.

Each rank quantises its own part, weights and inputs alike, and the sums are of dequantised numbers:
ranks need not agree on a scale.  Of a row-parallel linear's input each part has scales of its own,
dynamic or calibrated, which span fewer numbers than the scale of the whole would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..core.quantized_activation import QuantizedActivation
from . import ops
from .branching import BatchSource
from .kernels.base import LinearKernel
from .routed import RoutedLinear


class Split(StrEnum):
    """Along what a linear is split, and what becomes of the ranks' outputs.

    `column`: each rank keeps its outputs.  `gathered`: outputs split, and put together after the
    multiplication.  `row`: inputs split, outputs summed.
    """

    COLUMN = "column"
    GATHERED = "gathered"
    ROW = "row"


@dataclass(frozen=True, eq=False)
class LinearShard:
    """One rank's part of a linear of K inputs and N outputs.

    Attributes:
        split: how it is split.
        rank: this one, counted within `group`.
        edges: where parts begin and end along the split dimension: 0, ..., N (or K for `row`); one
            more than there are ranks.
        group: over which outputs are put together.
        features: N, of the whole linear.
    """

    split: Split
    rank: int
    edges: tuple[int, ...]
    group: dist.ProcessGroup
    features: int

    @property
    def own(self) -> slice:
        """This rank's part along the split dimension."""
        return slice(self.edges[self.rank], self.edges[self.rank + 1])

    @property
    def by_rows(self) -> bool:
        """Whether inputs are split, and this rank's output is a partial sum."""
        return self.split == Split.ROW

    @property
    def out_features(self) -> int:
        """The columns of what `joined` gives."""
        own = self.own
        return own.stop - own.start if self.split == Split.COLUMN else self.features

    def joined(self, out: torch.Tensor) -> torch.Tensor:
        """What the linear hands on, of this rank's output; every rank calls it.

        Args:
            out: (..., N), partial sums, written in place; or (..., this rank's outputs).

        Returns:
            (..., `out_features`) in the dtype of `out`.  Sums are those of the group's backend: in
            the dtype of `out`, and the same bytes on all ranks.
        """
        if self.split == Split.COLUMN:
            return out
        if not out.numel():
            # All ranks see as few rows.
            return out.new_empty((*out.shape[:-1], self.features))
        if self.split == Split.GATHERED:
            return gather_parts(out, -1, self.edges, self.group)
        out = out.contiguous()
        dist.all_reduce(out, group=self.group)
        return out


def even_edges(size: int, ranks: int) -> tuple[int, ...]:
    """Where parts begin and end as `torch.chunk` cuts them: all alike but the last ones."""
    part = -(-size // ranks)
    return tuple(min(rank * part, size) for rank in range(ranks + 1))


def gather_parts(
    part: torch.Tensor, dim: int, edges: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """The whole tensor of all ranks' parts along `dim`; every rank of `group` calls it.

    Args:
        part: this rank's.
        dim: along which they are put together.
        edges: as of `LinearShard`; the first part is the longest.
        group: whose backend serves the tensor's device.
    """
    # Backends exchange tensors of one shape.
    part = part.movedim(dim, -1)
    padded = F.pad(part, (0, edges[1] - part.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in edges[1:]]
    dist.all_gather(parts, padded, group=group)
    sizes = [end - begin for begin, end in pairwise(edges)]
    whole = torch.cat([p[..., :size] for p, size in zip(parts, sizes, strict=True)], -1)
    # Sums over a tensor go by how it lies, and digests with them.
    return whole.movedim(-1, dim).contiguous()


class ShardedLinear(RoutedLinear):
    """A `RoutedLinear` of one rank's part; its output is joined with that of the other ranks.

    Kernel, codes, sites and branches are those of the part alone, so everything up to the exchange
    is as in a model that is not split.

    Args:
        name, index, kernel, source, dtype, device, original: as there, of the part.
        shard: which part it is.
    """

    def __init__(
        self,
        name: str,
        index: int,
        kernel: LinearKernel,
        source: BatchSource,
        dtype: torch.dtype,
        device: torch.device,
        original: nn.Module | None = None,
        *,
        shard: LinearShard,
    ) -> None:
        super().__init__(name, index, kernel, source, dtype, device, original)
        self.shard = shard

    def forward(self, input: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """(..., K) to (..., `shard.out_features`), all ranks at once."""
        if torch.compiler.is_compiling():
            return ops.routed_linear(input, self.handle, self.shard.out_features)
        return self.shard.joined(super().forward(input))

    def run(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """The forward inside of a compiled graph's op."""
        return self.shard.joined(super().run(x))

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        shard = self.shard
        ranks = len(shard.edges) - 1
        return f"{super().extra_repr()}, {shard.split} part {shard.rank + 1} of {ranks}"
