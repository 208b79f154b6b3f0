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
    if native.computes(rows) and request.a.dtype in native.LORA_DTYPES:
        return native.shrink(rows, request)
    return shrink_eager(rows, request)


def shrink_eager(rows: torch.Tensor, request: Shrink) -> torch.Tensor:
    """The definition, on `rows` (M, K); one product of the batch's shape, whatever the slots."""
    requests = request.slots.shape[0]
    out = rows.new_zeros((rows.shape[0], request.width), dtype=torch.float32)
    if not rows.shape[0] or not request.a.shape[0]:
        return out
    taken = request.slots >= 0
    index = torch.where(taken, request.slots, 0)
    # Autocast would round the product to half precision.
    with torch.autocast(rows.device.type, enabled=False):
        by_request = rows.unflatten(0, (requests, -1)).float()
        product = torch.bmm(by_request, request.a[index].float().mT)
    return torch.where(taken.view(-1, 1, 1), product, 0.0).reshape(out.shape)
