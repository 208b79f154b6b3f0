"""What the ranks of a replica tell each other beside the forwards: values of Python, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from reprlib import repr as brief
from typing import Any

import torch
import torch.distributed as dist

from ...core.errors import RankError
from ...linear.sharded import gather_parts

# A rank reads its adapter from a disk of its own meanwhile.
_PATIENCE = timedelta(minutes=5)


class Ranks:
    """The ranks of one replica; its exchanges never mix with those of forwards.

    Every rank makes one, and calls its methods in the same order.  Whoever waits longer than the
    time-out for the others gets torch's `RuntimeError`.

    Args:
        group: the ranks whose forwards are one.
        timeout: how long to wait for the others.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta = _PATIENCE) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        members = dist.get_process_group_ranks(group)
        side = dist.new_group(
            members, timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        assert isinstance(side, dist.ProcessGroup)
        self._side = side

    def close(self) -> None:
        """Give the connections back; not used afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group(self._side)

    def told_by_all(self, value: Any) -> tuple[Any, ...]:
        """What each rank passes, in the order of ranks.

        Args:
            value: anything that pickles; ranks trust each other.
        """
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._side)
        return tuple(values)

    def check_alike(self, subject: str, value: Any) -> None:
        """Refuse on all ranks where they do not pass equal values.

        Args:
            subject: what it is about, for messages.
            value: as in `told_by_all`.

        Raises:
            RankError: they differ.
        """
        values = self.told_by_all(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankError(
                    subject,
                    f"rank {rank} has {brief(other)} where rank 0 has {brief(values[0])}",
                    "start all ranks alike, and call them in the same order",
                )

    def gather(
        self, subject: str, part: torch.Tensor, dim: int, edges: Sequence[int]
    ) -> torch.Tensor:
        """The whole of a CPU tensor of which each rank has a part along `dim`; see `gather_parts`.

        Raises:
            RankError: the ranks do not ask for the same.
        """
        self.check_alike(subject, (subject, dim, tuple(edges)))
        return gather_parts(part, dim, edges, self._side)
