"""The definition of the low-rank product, by torch's own ops, on any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.platform import Platform
from ...core.selection import ACCEPTED, Verdict
from ...linear.outputs import Shrink, gather_slots
from ...linear.shrink import shrink
from .base import LowRankCall, LowRankConfig, LowRankKernel


class EagerLowRank(LowRankKernel):
    """One batched product of a shape that depends on the batch's shape alone."""

    name = "eager"

    @classmethod
    def serves(cls, config: LowRankConfig, platform: Platform) -> Verdict:
        return ACCEPTED

    def accepts(self, out: torch.Tensor, x: torch.Tensor) -> Verdict:
        return ACCEPTED

    @classmethod
    def run(cls, calls: Sequence[LowRankCall]) -> list[torch.Tensor]:
        return [call.kernel._added(call) for call in calls]

    def _added(self, call: LowRankCall) -> torch.Tensor:
        out, slots, stack = call.out, call.slots, self.stack
        shrunk = call.source
        if not call.shrunk:
            request = Shrink(
                stack.name, stack.a, stack.starts, stack.ranks, slots, stack.width, stack.width
            )
            shrunk = shrink(shrunk, request)
        rows = slots.shape[0]
        if not out.shape[0]:
            return out
        b = gather_slots(stack.b, stack.starts, stack.ranks, slots, stack.width)
        # Autocast would round the product to half precision.
        with torch.autocast(out.device.type, enabled=False):
            delta = torch.bmm(shrunk.view(rows, -1, stack.width), b.float())
        delta *= stack.scaling[slots.clamp(min=0)].view(-1, 1, 1)
        by_request = out.view(rows, -1, out.shape[1])
        total = (by_request.float() + delta).to(out.dtype)
        # Selected, not added as zeros: a zero would turn -0.0 into 0.0.
        return torch.where((slots >= 0).view(-1, 1, 1), total, by_request).view(out.shape)
