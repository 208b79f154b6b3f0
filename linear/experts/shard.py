"""Experts that are split over the ranks of a group: some whole experts on each rank.

Every rank sees all tokens and computes the pairs of its own experts; the weighted sums of the ranks
are added up.  The sums travel in float32 and are rounded once, as on a single rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class ExpertsShard:
    """One rank's experts of a layer.

    Attributes:
        rank: this one, counted within `group`.
        experts: how many experts each rank has.
        group: over which outputs are added up.
    """

    rank: int
    experts: int
    group: dist.ProcessGroup

    @property
    def own(self) -> slice:
        """This rank's experts among all of the layer."""
        return slice(self.rank * self.experts, (self.rank + 1) * self.experts)

    def local(self, index: torch.Tensor) -> torch.Tensor:
        """A router's choice, (T, k), by the numbers that experts have here; -1 where elsewhere."""
        own = self.own
        here = (index >= own.start) & (index < own.stop)
        return torch.where(here, index - own.start, -1)

    def joined(self, total: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of (T, N), float32, written in place; every rank calls it."""
        if total.numel():
            dist.all_reduce(total, group=self.group)
        return total
