"""The low-rank part of a linear's branch, for all adapters at once: shrink, expand, add.

A and B of all slots lie in two pools, in which a slot has as many rows as its rank class says, so
that high ranks cost low ones nothing.  `kernels/` multiplies with them, row by row.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import torch

from ..core.platform import Platform, detect_platform
from ..linear.branching import BranchInput
from ..linear.outputs import Shrink
from ..linear.probing import is_probing
from .kernels.base import LowRankCall, LowRankConfig, LowRankStack
from .kernels.eager import EagerLowRank
from .kernels.selection import select_low_rank
from .slots import SlotClasses
from .weights import LowRank


class LowRankSlots:
    """The matrices of one linear: fixed addresses, one place a slot.

    Args:
        name: of the linear, for messages.
        slots: of the model.
        in_features: K.
        out_features: N.
        dtype: of the matrices.
        device: of the matrices.

    Attributes:
        a: (slots.rows, K).
        b: (slots.rows, N): B transposed.
        starts: int32 (slots,), the first row of each slot in both.
        ranks: int32 (slots,), 0 for an empty slot.
        scaling: float32 (slots,).
        kernel: what multiplies with them.
        fallbacks: calls that the eager definition computed instead, by the kernel's reason.
    """

    def __init__(
        self,
        name: str,
        slots: SlotClasses,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.width = slots.width
        self.a = torch.zeros(slots.rows, in_features, dtype=dtype, device=device)
        self.b = torch.zeros(slots.rows, out_features, dtype=dtype, device=device)
        self.scaling = torch.zeros(len(slots), dtype=torch.float32, device=device)
        self.starts = torch.tensor(slots.starts, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(len(slots), dtype=torch.int32, device=device)
        stack = LowRankStack(
            name, self.a, self.b, self.starts, self.ranks, self.scaling, self.width
        )
        selection = select_low_rank(LowRankConfig(dtype, self.width), _platform(device))
        self.kernel = selection.kernel(stack)
        self.rejected = selection.rejected
        self.fallbacks: Counter[str] = Counter()
        self._eager = EagerLowRank(stack)
        self._starts = slots.starts
        self._held = slots.ranks
        # Of one number, an array is written many times quicker than a tensor.
        on_cpu = device.type == "cpu"
        self._scaling = self.scaling.numpy() if on_cpu else self.scaling
        self._ranks = self.ranks.numpy() if on_cpu else self.ranks

    @property
    def nbytes(self) -> int:
        """Device memory of the pools."""
        return self.a.nbytes + self.b.nbytes

    def write(self, slot: int, weights: LowRank) -> None:
        """Fill a slot; rows beyond the rank are read by nobody."""
        rank, start = weights.rank, self._starts[slot]
        self.a.narrow(0, start, rank).copy_(weights.a)
        self.b.narrow(0, start, rank).copy_(weights.b.mT)
        self._scaling[slot] = weights.scaling
        self._ranks[slot] = rank

    def write_run(self, first: int, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        """Fill slots of one rank class in turn, each with a product of its own.

        Args:
            first: the first of them.
            a: (slots, r, K).
            b: (slots, N, r).
            scaling: of all.
        """
        number, rank, _ = a.shape
        rows = slice(self._starts[first], self._starts[first] + number * self._held[first])
        a_pool = self.a[rows].unflatten(0, (number, -1))
        b_pool = self.b[rows].unflatten(0, (number, -1))
        a_pool[:, :rank].copy_(a)
        b_pool[:, :rank].copy_(b.mT)
        self.scaling[first : first + number] = scaling
        self.ranks[first : first + number] = rank

    def clear(self, slot: int, number: int = 1) -> None:
        """Empty a slot, or several: what lies there has no rank, and is read by nobody."""
        if number == 1:
            self._ranks[slot] = 0
        else:
            self.ranks[slot : slot + number] = 0

    def shrink_request(self, slots: torch.Tensor, rank: int) -> Shrink:
        """What shrinks the raw activation for rows of `slots` (int32 (R,), -1 for none)."""
        return Shrink(self.name, self.a, self.starts, self.ranks, slots, rank, self.width)

    def expand(self, shrunk: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`shrunk` (M, width) times each row's B and scaling: float32 (M, N), zeros without one."""
        out = shrunk.new_zeros((shrunk.shape[0], self.b.shape[1]))
        return self._run_one(self.call(out, shrunk, slots, shrunk=True))

    def add(self, out: torch.Tensor, x: BranchInput, slots: torch.Tensor) -> torch.Tensor:
        """Add the branch of each row that has one.

        Args:
            out: (M, N), the base output; may be written to.
            x: the layer's input, (M, K): raw, or shrunk by its producer.
            slots: int32 (R,), contiguous, -1 for none; the M rows belong to R requests in turn.

        Returns:
            (M, N) in the dtype of `out`: float32 accumulation, one rounding.

        Raises:
            RawConsumerError: there are only codes.
        """
        return self._run_one(self.call_for(out, x, slots))

    def call_for(self, out: torch.Tensor, x: BranchInput, slots: torch.Tensor) -> LowRankCall:
        """What `add` asks the kernel for; arguments and errors as there."""
        shrunk = x.shrunk()
        if shrunk is not None:
            return self.call(out, shrunk, slots, shrunk=True)
        return self.call(out, x.values(), slots)

    def call(
        self, out: torch.Tensor, source: torch.Tensor, slots: torch.Tensor, shrunk: bool = False
    ) -> LowRankCall:
        """A call of the kernel, or of the eager definition where the kernel refuses the tensors."""
        verdict = self.kernel.accepts(out, source)
        if verdict.ok:
            return LowRankCall(self.kernel, out, source, slots, shrunk)
        if not is_probing():
            self.fallbacks[verdict.reason] += 1
        return LowRankCall(self._eager, out, source, slots, shrunk)

    def _run_one(self, call: LowRankCall) -> torch.Tensor:
        return call.kernel.run((call,))[0]


# Asking reads the versions of packages from the disk, and there are hundreds of linears.
@lru_cache(maxsize=16)
def _platform(device: torch.device) -> Platform:
    return detect_platform(device)
