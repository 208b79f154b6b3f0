"""Shrink and expand of rows that belong to requests in turn, each with its own slot.

There is one launch of each for all linears that share an input.

A program handles up to `_TILE` rows of one request: the tokens of a prompt, or the one row of a
request that decodes, by the same instructions in the same order.  The columns are cut into pieces
of `_PIECE`, whose sums the expand adds in their order; how many there are depends on the columns
alone.  So a row's bytes do not depend on how many there are, and no atomics are used.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from ....linear.outputs import empty
from ....linear.rows import as_rows, rows_of
from ..base import LowRankCall

if TYPE_CHECKING:
    # Within a kernel a constant is what was passed, not the box that it came in.
    constexpr = Any
else:
    constexpr = tl.constexpr

_TILE = 16
_MOST_RANKS = 64
_PIECE = 1024
_SHRINK_COLUMNS = 128
_EXPAND_CHANNELS = 256


class Linear(NamedTuple):
    """One linear, as kernels see it.

    Attributes:
        a: the pool of A.
        b: the pool of B.
        starts: int32 (slots,).
        ranks: int32 (slots,).
        scaling: float32 (slots,).
        slots: int32 (R,).
        shrunk: float32 (pieces, M, width).
        pieces: how many.
        out: (M, N).
        out_stride: of its rows.
        channels: N.
    """

    a: Any
    b: Any
    starts: Any
    ranks: Any
    scaling: Any
    slots: Any
    shrunk: Any
    pieces: Any
    out: Any
    out_stride: Any
    channels: Any


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
def _place(linear, per_request, ROWS: constexpr):
    """Of this program: the slot's first row in the pools and its rank (0 for none), the first row
    of the activation, how many there are, and the slot.
    """
    tiles = tl.cdiv(per_request, ROWS)
    request = tl.program_id(0) // tiles
    begin = tl.program_id(0) % tiles * ROWS
    slot = tl.load(linear.slots + request)
    held = slot >= 0
    start = tl.load(linear.starts + slot, mask=held, other=0)
    rank = tl.load(linear.ranks + slot, mask=held, other=0)
    count = tl.minimum(per_request - begin, ROWS)
    return start, rank, request * per_request + begin, count, slot


@triton.jit
def _shrink(
    linear, x, x_stride, rows, per_request, columns, width,
    ROWS: constexpr, RANK: constexpr, PIECE: constexpr, BLOCK: constexpr, NARROW: constexpr,
):  # fmt: skip
    start, rank, first, count, _ = _place(linear, per_request, ROWS)
    ranks = tl.cdiv(width, RANK)
    low, piece = tl.program_id(1) % ranks * RANK, tl.program_id(1) // ranks
    if low < rank:
        row = tl.arange(0, ROWS)[:, None]
        index = low + tl.arange(0, RANK)[None, :]
        x_row = x + (first + row).to(tl.int64) * x_stride
        a_row = linear.a + (start + index).to(tl.int64) * columns
        sums = tl.full([ROWS, RANK], 0.0, tl.float32)
        for at in range(piece * PIECE, tl.minimum(columns, piece * PIECE + PIECE), BLOCK):
            across = at + tl.arange(0, BLOCK)
            wide, high = across[None, :], across[:, None]
            value = _load(x_row + wide, (row < count) & (wide < columns))
            factor = _load(a_row + high, (index < rank) & (high < columns))
            sums = _dot(value, factor, sums, NARROW)
        to = linear.shrunk + (piece * rows + first + row).to(tl.int64) * width + index
        tl.store(to, sums, mask=(row < count) & (index < rank))


@triton.jit
def shrink_kernel(
    x, x_stride, linears, rows, per_request, columns, width,
    ROWS: constexpr, RANK: constexpr, PIECE: constexpr, BLOCK: constexpr, NARROW: constexpr,
):  # fmt: skip
    """RANK columns of one piece of `shrunk`: each row times its slot's A; nothing beyond its rank.

    The grid: tiles of rows, blocks of ranks times pieces, linears.
    """
    for i in tl.static_range(len(linears)):
        if tl.program_id(2) == i:
            _shrink(
                linears[i], x, x_stride, rows, per_request, columns, width,
                ROWS, RANK, PIECE, BLOCK, NARROW,
            )  # fmt: skip


@triton.jit
def _expand(linear, rows, per_request, width, ROWS: constexpr, BLOCK: constexpr):
    start, rank, first, count, slot = _place(linear, per_request, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (slot >= 0) & (tl.program_id(1) * BLOCK < linear.channels):
        row = tl.arange(0, ROWS)
        live, inside = row < count, channel < linear.channels
        values = linear.shrunk + (first + row).to(tl.int64) * width
        factors = linear.b + start.to(tl.int64) * linear.channels + channel
        total = tl.full([ROWS, BLOCK], 0.0, tl.float32)
        for _ in range(0, rank):
            value = tl.load(values, mask=live, other=0.0)
            others = values
            for _ in range(1, linear.pieces):
                others += rows * width
                value += tl.load(others, mask=live, other=0.0)
            factor = _load(factors, inside)
            total = tl.fma(value[:, None], factor[None, :], total)
            values += 1
            factors += linear.channels
        mask = live[:, None] & inside[None, :]
        to = linear.out + (first + row).to(tl.int64)[:, None] * linear.out_stride + channel[None, :]
        added = _load(to, mask) + total * tl.load(linear.scaling + slot)
        tl.store(to, _narrow(added, linear.out.dtype.element_ty), mask=mask)


@triton.jit
def expand_kernel(
    linears, rows, per_request, width, ROWS: constexpr, BLOCK: constexpr
):  # fmt: skip
    """BLOCK columns of `out` (M, N): plus each row's product; a chain of products, rank by rank.

    The grid: tiles of rows, blocks of channels, linears.
    """
    for i in tl.static_range(len(linears)):
        if tl.program_id(2) == i:
            _expand(linears[i], rows, per_request, width, ROWS, BLOCK)


def launch(calls: Sequence[LowRankCall]) -> None:
    """Add the products of several linears to their outputs: one shrink, one expand.

    Args:
        calls: of the same M rows, whose raw sources are one tensor, and whose pools are of one
            dtype and width; outputs are rows of neighbours.
    """
    raw = next((call.source for call in calls if not call.shrunk), None)
    if raw is not None and as_rows(raw) is None:
        raw = raw.contiguous()
    linears = [_linear(call, 1 if raw is None else _pieces(raw.shape[-1])) for call in calls]
    if raw is not None:
        shrinking = [linear for linear, call in zip(linears, calls, strict=True) if not call.shrunk]
        _launch_shrink(raw, shrinking, calls[0].kernel.stack.width)
    _launch_expand(linears, calls[0].kernel.stack.width)


def _pieces(columns: int) -> int:
    return max(1, triton.cdiv(columns, _PIECE))


def _linear(call: LowRankCall, pieces: int) -> Linear:
    stack, out, shrunk = call.kernel.stack, call.out, call.source
    if call.shrunk:
        pieces, shrunk = 1, shrunk.contiguous()
    else:
        # What no slot's rank reaches is neither written nor read.
        shrunk = empty((pieces, out.shape[0], stack.width), torch.float32, out.device)
    return Linear(
        stack.a, stack.b, stack.starts, stack.ranks, stack.scaling, call.slots, shrunk, pieces,
        out, out.stride(0), out.shape[1],
    )  # fmt: skip


def _launch_shrink(x: torch.Tensor, linears: Sequence[Linear], width: int) -> None:
    rows, requests = rows_of(x), linears[0].slots.shape[0]
    if not rows.number or not width:
        return
    rank = min(_MOST_RANKS, max(_TILE, triton.next_power_of_2(width)))
    narrow = x.dtype == linears[0].a.dtype == torch.bfloat16
    per_request = rows.number // requests
    grid = (
        requests * triton.cdiv(per_request, _TILE),
        triton.cdiv(width, rank) * _pieces(rows.columns),
        len(linears),
    )
    kernel: Any = shrink_kernel
    kernel[grid](
        x,
        rows.stride,
        tuple(linears),
        rows.number,
        per_request,
        rows.columns,
        width,
        ROWS=_TILE,
        RANK=rank,
        PIECE=_PIECE,
        BLOCK=_SHRINK_COLUMNS if narrow else _SHRINK_COLUMNS // 4,
        NARROW=narrow,
        num_warps=4 if narrow else 8,
        num_stages=3 if narrow else 1,
        **OPTIONS,
    )


def _launch_expand(linears: Sequence[Linear], width: int) -> None:
    requests, number = linears[0].slots.shape[0], linears[0].out.shape[0]
    widest = max(linear.channels for linear in linears)
    if not number or not widest:
        return
    per_request = number // requests
    # Each element is a chain of its own, so that the height of a tile does not show.
    tile = 1 if per_request == 1 else _TILE
    grid = (
        requests * triton.cdiv(per_request, tile),
        triton.cdiv(widest, _EXPAND_CHANNELS),
        len(linears),
    )
    kernel: Any = expand_kernel
    kernel[grid](
        tuple(linears),
        number,
        per_request,
        width,
        ROWS=tile,
        BLOCK=_EXPAND_CHANNELS,
        num_warps=4 if tile == 1 else 8,
        num_stages=1,
        **OPTIONS,
    )
