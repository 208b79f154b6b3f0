"""The plain products of several linears that read one tensor, in one launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ..core.quantized_activation import QuantizedActivation
from ..linear.branching import BranchInput
from .kernels.base import MOST_CALLS, LowRankCall
from .low_rank import LowRankSlots


class JointProduct:
    """Made once a batch: what does not change from forward to forward is worked out here.

    Args:
        stacks: the matrices of each linear.
        slots: int32 (R,) of each, contiguous, -1 for none.
    """

    def __init__(self, stacks: Sequence[LowRankSlots], slots: Sequence[torch.Tensor]) -> None:
        self._stacks = tuple(stacks)
        self._slots = tuple(slots)
        kernels = [stack.kernel for stack in stacks]
        one_kind = len({type(kernel) for kernel in kernels}) == 1 and len(kernels) <= MOST_CALLS
        self._launch = kernels[0].launcher(kernels, self._slots) if one_kind else None

    def __call__(
        self, outs: Sequence[torch.Tensor], x: torch.Tensor | QuantizedActivation
    ) -> Sequence[torch.Tensor]:
        """Add to each of `outs` (M, N) the branch of each row that has one.

        Raises:
            RawConsumerError: there are only codes.
        """
        if self._launch is not None:
            raw = x if isinstance(x, torch.Tensor) else self._raw_of(x)
            if raw is not None and raw.dtype.itemsize > 1 and self._launch(outs, raw):
                return outs
        calls = [
            stack.call_for(out, BranchInput(x, stack.name), slots)
            for stack, out, slots in zip(self._stacks, outs, self._slots, strict=True)
        ]
        return _run(calls)

    def _raw_of(self, x: QuantizedActivation) -> torch.Tensor | None:
        return None if x.shrunk else x.require_raw_rows(self._stacks[0].name).values


def _run(calls: Sequence[LowRankCall]) -> list[torch.Tensor]:
    added: list[torch.Tensor] = []
    for kind, group in itertools.groupby(calls, key=lambda call: type(call.kernel)):
        alike = list(group)
        for at in range(0, len(alike), MOST_CALLS):
            added += kind.run(alike[at : at + MOST_CALLS])
    return added
