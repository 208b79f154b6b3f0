"""The definition of the low-rank product, by torch's own ops, on any device and dtype."""

from __future__ import annotations

import torch

from ...core.platform import Platform
from ...core.selection import ACCEPTED, Verdict
from ...linear.outputs import Shrink, gather_slots
from ...linear.shrink import shrink
from .base import LowRankConfig, LowRankKernel


class EagerLowRank(LowRankKernel):
    """One batched product of a shape that depends on the batch's shape alone."""

    name = "eager"

    @classmethod
    def serves(cls, config: LowRankConfig, platform: Platform) -> Verdict:
        return ACCEPTED

    def accepts(self, out: torch.Tensor, x: torch.Tensor) -> Verdict:
        return ACCEPTED

    def add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        stack = self.stack
        request = Shrink(
            stack.name, stack.a, stack.starts, stack.ranks, slots, stack.width, stack.width
        )
        return self.expand(out, shrink(x, request), slots)

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        stack, rows = self.stack, slots.shape[0]
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
