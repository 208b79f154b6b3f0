"""The LoRA shrink: a raw activation times each row's own A, by one definition for every route.

Whoever needs it, a branch that reads the raw activation or a producer that absorbs it, computes
each row's product by the same kernel in the same order, so that all routes agree to the bit.
"""

from __future__ import annotations

import torch

from . import native
from .outputs import Shrink


def shrink(x: torch.Tensor, request: Shrink) -> torch.Tensor:
    """Each row of `x` (..., K) times its request's A.

    Returns:
        float32 (M, width): M flattened rows; float32 accumulation.  Zeros beyond a slot's rank
        and in rows without a slot.
    """
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if native.shrinks(rows, request.a):
        return native.shrink(rows, request)
    return shrink_eager(rows, request)


def shrink_eager(rows: torch.Tensor, request: Shrink) -> torch.Tensor:
    """The definition, on `rows` (M, K); one product of the batch's shape, whatever the slots."""
    if not rows.shape[0]:
        return rows.new_zeros((0, request.width), dtype=torch.float32)
    index = torch.arange(request.width, device=rows.device)
    held = request.ranks[request.slots.clamp(min=0)] if request.ranks.shape[0] else request.slots
    live = (request.slots >= 0).unsqueeze(1) & (index < held.unsqueeze(1))
    # Autocast would round the product to half precision.
    with torch.autocast(rows.device.type, enabled=False):
        by_request = rows.unflatten(0, (request.slots.shape[0], -1)).float()
        product = torch.bmm(by_request, request.gathered().float().mT)
    # A zero of A times an infinity of the activation is no zero.
    return torch.where(live.unsqueeze(1), product, 0.0).flatten(0, 1)
