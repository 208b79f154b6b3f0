"""Shrink and expand of rows that belong to requests in turn, each with its own slot.

A program handles up to `_TILE` rows of one request: the tokens of a prompt, or the one row of a
request that decodes, by the same instructions in the same order.  So a row's bytes do not depend on
how many there are.  Nothing is split along the columns or the rank, and no atomics are used.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ....fusion.kernels.numerics import (
    INTERPRETED,
    load_bf16,
    narrow_bf16,
    round_bf16,
)
from ....fusion.kernels.plan import OPTIONS
from ....linear.rows import Rows
from ..base import LowRankStack

if TYPE_CHECKING:
    # Within a kernel a constant is what was passed, not the box that it came in.
    constexpr = Any
else:
    constexpr = tl.constexpr

_TILE = 16
_MOST_RANKS = 64
_SHRINK_COLUMNS = 128
_EXPAND_CHANNELS = 256


@triton.jit
def _load(pointers, mask):
    """As float32; 0 where masked."""
    if pointers.dtype.element_ty == tl.bfloat16:
        wide = load_bf16(pointers, mask)
    else:
        wide = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return wide


@triton.jit
def _narrow(x, DTYPE: constexpr):
    if tl.bfloat16 == DTYPE:
        narrow = narrow_bf16(round_bf16(x))
    else:
        narrow = x.to(DTYPE)
    return narrow


@triton.jit
def _dot(x, a, sums, NARROW: constexpr):
    """`sums` and (rows, columns) times (columns, ranks), in float32."""
    if NARROW and not INTERPRETED:
        # Values came from bfloat16: the way back is exact.
        added = tl.dot(x.to(tl.bfloat16), a.to(tl.bfloat16), sums)
    else:
        added = tl.dot(x, a, sums, input_precision="ieee")
    return added


@triton.jit
def _place(slots, starts, ranks, per_request, ROWS: constexpr):
    """Of this program: the slot's first row in the pools and its rank (0 for none), the first row
    of the activation, how many there are, and the slot.
    """
    tiles = tl.cdiv(per_request, ROWS)
    request = tl.program_id(0) // tiles
    begin = tl.program_id(0) % tiles * ROWS
    slot = tl.load(slots + request)
    held = slot >= 0
    start = tl.load(starts + slot, mask=held, other=0)
    rank = tl.load(ranks + slot, mask=held, other=0)
    count = tl.minimum(per_request - begin, ROWS)
    return start, rank, request * per_request + begin, count, slot


@triton.jit
def shrink_kernel(
    x, x_stride, a, starts, ranks, slots, out, per_request, columns, width,
    ROWS: constexpr, RANK: constexpr, BLOCK: constexpr, NARROW: constexpr,
):  # fmt: skip
    """RANK columns of `out` (M, width): each row times its slot's A; nothing beyond its rank."""
    start, rank, first, count, _ = _place(slots, starts, ranks, per_request, ROWS)
    low = tl.program_id(1) * RANK
    if low < rank:
        row = tl.arange(0, ROWS)[:, None]
        index = low + tl.arange(0, RANK)[None, :]
        x_row = x + (first + row).to(tl.int64) * x_stride
        a_row = a + (start + index).to(tl.int64) * columns
        sums = tl.full([ROWS, RANK], 0.0, tl.float32)
        for at in range(0, columns, BLOCK):
            across = at + tl.arange(0, BLOCK)
            wide, high = across[None, :], across[:, None]
            value = _load(x_row + wide, (row < count) & (wide < columns))
            factor = _load(a_row + high, (index < rank) & (high < columns))
            sums = _dot(value, factor, sums, NARROW)
        to = out + (first + row).to(tl.int64) * width + index
        tl.store(to, sums, mask=(row < count) & (index < rank))


@triton.jit
def expand_kernel(
    shrunk, b, starts, ranks, scaling, slots, out, out_stride, per_request, channels, width,
    ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """BLOCK columns of `out` (M, N): plus each row's product; a chain of products, rank by rank."""
    start, rank, first, count, slot = _place(slots, starts, ranks, per_request, ROWS)
    if slot >= 0:
        row = tl.arange(0, ROWS)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live, inside = row < count, channel < channels
        values = shrunk + (first + row).to(tl.int64) * width
        factors = b + start.to(tl.int64) * channels + channel
        total = tl.full([ROWS, BLOCK], 0.0, tl.float32)
        for _ in range(0, rank):
            value = tl.load(values, mask=live, other=0.0)
            factor = _load(factors, inside)
            total = tl.fma(value[:, None], factor[None, :], total)
            values += 1
            factors += channels
        mask = live[:, None] & inside[None, :]
        to = out + (first + row).to(tl.int64)[:, None] * out_stride + channel[None, :]
        added = _load(to, mask) + total * tl.load(scaling + slot)
        tl.store(to, _narrow(added, out.dtype.element_ty), mask=mask)


def launch_shrink(
    x: torch.Tensor, rows: Rows, stack: LowRankStack, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill `out`, float32 (M, width), up to each row's rank.

    Args:
        x: (..., K).
        rows: of `x`.
        stack: the matrices.
        slots: int32 (R,).
        out: contiguous.
    """
    requests = slots.shape[0]
    if not rows.number or not stack.width:
        return
    rank = min(_MOST_RANKS, max(_TILE, triton.next_power_of_2(stack.width)))
    narrow = x.dtype == stack.a.dtype == torch.bfloat16
    per_request = rows.number // requests
    grid = (requests * triton.cdiv(per_request, _TILE), triton.cdiv(stack.width, rank))
    kernel: Any = shrink_kernel
    kernel[grid](
        x,
        rows.stride,
        stack.a,
        stack.starts,
        stack.ranks,
        slots,
        out,
        per_request,
        rows.columns,
        stack.width,
        ROWS=_TILE,
        RANK=rank,
        BLOCK=_SHRINK_COLUMNS if narrow else _SHRINK_COLUMNS // 4,
        NARROW=narrow,
        num_warps=4 if narrow else 8,
        num_stages=3 if narrow else 1,
        **OPTIONS,
    )


def launch_expand(
    shrunk: torch.Tensor, stack: LowRankStack, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Add to `out` (M, N) the product of the shrunk rows, float32 (M, width), contiguous.

    Args:
        shrunk: read up to each row's rank.
        stack: the matrices.
        slots: int32 (R,).
        out: rows of neighbours, written in place.
    """
    requests, number = slots.shape[0], out.shape[0]
    if not number or not out.shape[1]:
        return
    per_request = number // requests
    # Each element is a chain of its own, so that the height of a tile does not show.
    tile = 1 if per_request == 1 else _TILE
    grid = (requests * triton.cdiv(per_request, tile), triton.cdiv(out.shape[1], _EXPAND_CHANNELS))
    kernel: Any = expand_kernel
    kernel[grid](
        shrunk,
        stack.b,
        stack.starts,
        stack.ranks,
        stack.scaling,
        slots,
        out,
        out.stride(0),
        per_request,
        out.shape[1],
        stack.width,
        ROWS=tile,
        BLOCK=_EXPAND_CHANNELS,
        num_warps=4,
        num_stages=1,
        **OPTIONS,
    )
