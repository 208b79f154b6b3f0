"""The LoRA shrink of a tile of the raw activation, in registers.

Sixteen rows are multiplied at a time, always by the same instructions in the same order of columns,
whatever the number of rows, consumers and ranks: a row's product does not depend on them.  The
columns are added in chunks of fixed size, and the chunks in order, whoever adds them.
"""

# pyright: reportGeneralTypeIssues=false
# Whose `static_range` is one only to the compiler.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .numerics import INTERPRETED, constexpr

TILE = 16


class ShrinkTarget(NamedTuple):
    """What one consumer's branches multiply with, and where it goes: `linear.outputs.Shrink`.

    Attributes:
        a: (rows, K).
        row_stride: elements from one of its rows to the next.
        starts: int32 (slots,).
        ranks: int32 (slots,).
        slots: int32 (R,).
        out: float32 (rows, width), contiguous.
        width: its columns.
    """

    a: Any
    row_stride: int
    starts: Any
    ranks: Any
    slots: Any
    out: Any
    width: int


@triton.jit
def zero_sums(NUMBER: constexpr, RANK: constexpr):
    """(16, RANK) of zeros, NUMBER times."""
    sums = ()
    for _ in tl.static_range(NUMBER):
        sums += (tl.full([16, RANK], 0.0, tl.float32),)
    return sums


@triton.jit
def add_sums(left, right):
    """Sums of all consumers, added."""
    sums = ()
    for i in tl.static_range(len(left)):
        sums += (left[i] + right[i],)
    return sums


@triton.jit
def load_slots(shrinks, request, live):
    """Of each consumer, the slot of the request: -1 for none, and where not `live`."""
    slots = ()
    for i in tl.static_range(len(shrinks)):
        slots += (tl.load(shrinks[i].slots + request, mask=live, other=-1),)
    return slots


@triton.jit
def load_ranks(shrinks, slots):
    """Of each consumer, the rank of its slot; 0 without a slot, whose A is then never read."""
    ranks = ()
    for i in tl.static_range(len(shrinks)):
        ranks += (tl.load(shrinks[i].ranks + slots[i], mask=slots[i] >= 0, other=0),)
    return ranks


@triton.jit
def load_bases(shrinks, slots):
    """Of each consumer, the row of A at which its slot begins; 0 without a slot."""
    bases = ()
    for i in tl.static_range(len(shrinks)):
        bases += (tl.load(shrinks[i].starts + slots[i], mask=slots[i] >= 0, other=0),)
    return bases


@triton.jit
def _leading_half(x):
    """The upper half of a float32: a bfloat16, which leaves what it lacks exactly representable."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _dot(tile, a, sums, CONSUMER: constexpr, PIECES: constexpr):
    """`sums` of one consumer, and (16, BLOCK) times (BLOCK, RANK), in float32.

    A float32 is the sum of three bfloat16, so three products of bfloat16 make its exact product.
    Each has sums of its own: products that follow one another would keep all of A in every warp.
    Infinities and NaNs, on either side, count in the first product only.
    """
    if PIECES == 1:
        if INTERPRETED:
            added = (tl.dot(tile, a.to(tl.float32), sums[CONSUMER]),)
        else:
            added = (tl.dot(tile.to(tl.bfloat16), a, sums[CONSUMER]),)
    elif INTERPRETED:
        added = (
            tl.dot(tile, a.to(tl.float32), sums[3 * CONSUMER]),
            sums[3 * CONSUMER + 1],
            sums[3 * CONSUMER + 2],
        )
    else:
        a = a.to(tl.float32)
        first = tl.where(a == a, _leading_half(a), a)
        rest = tl.where(tl.abs(a) < float("inf"), a - first, 0.0)
        second = _leading_half(rest)
        finite = tl.where(tl.abs(tile) < float("inf"), tile, 0.0).to(tl.bfloat16)
        added = (
            tl.dot(tile.to(tl.bfloat16), first.to(tl.bfloat16), sums[3 * CONSUMER]),
            tl.dot(finite, second.to(tl.bfloat16), sums[3 * CONSUMER + 1]),
            tl.dot(finite, (rest - second).to(tl.bfloat16), sums[3 * CONSUMER + 2]),
        )
    return added


@triton.jit
def multiply(
    tile, sums, shrinks, bases, ranks, start, columns, PLAN: constexpr
):  # fmt: skip
    """`sums` and the products of a tile with each consumer's A: one a consumer and piece of A."""
    if PLAN.rows != 16:
        tile = tl.broadcast_to(tile, [16, PLAN.block])
    column = start + tl.arange(0, PLAN.block)[:, None]
    index = tl.arange(0, PLAN.rank)[None, :]
    added = ()
    for i in tl.static_range(len(shrinks)):
        shrink = shrinks[i]
        at = (bases[i] + index).to(tl.int64) * shrink.row_stride + column
        mask = (column < columns) & (index < ranks[i])
        a = tl.load(shrink.a + at, mask=mask, other=0.0)
        added = added + _dot(tile, a, sums, i, PLAN.pieces)
    return added


@triton.jit
def join_pieces(sums, PIECES: constexpr):
    """One sum a consumer."""
    joined = sums
    if PIECES == 3:
        joined = ()
        for i in tl.static_range(len(sums) // 3):
            joined += (sums[3 * i + 2] + sums[3 * i + 1] + sums[3 * i],)
    return joined


@triton.jit
def store_partial(sums, partial, ranks, chunk, rows, first, count, RANK: constexpr):
    """The sums of a chunk: float32 (chunks, rows, consumers, RANK)."""
    row = tl.arange(0, 16)[:, None]
    index = tl.arange(0, RANK)[None, :]
    number: constexpr = len(sums)
    at = tl.full([1, 1], rows, tl.int64) * chunk + first + row
    base = partial + at * (number * RANK) + index
    for i in tl.static_range(number):
        value = tl.where(index < ranks[i], sums[i], 0.0)
        tl.store(base + i * RANK, value, mask=(row < count) & (index < RANK))


@triton.jit
def store_sums(sums, shrinks, ranks, first, count, ROWS: constexpr, RANK: constexpr):
    """The shrunk rows: zeros from a slot's rank on."""
    row = tl.arange(0, ROWS)[:, None]
    index = tl.arange(0, RANK)[None, :]
    for i in tl.static_range(len(shrinks)):
        shrink = shrinks[i]
        value = tl.where(index < ranks[i], sums[i], 0.0)
        at = shrink.out + (first + row).to(tl.int64) * shrink.width
        for start in range(0, shrink.width, RANK):
            column = start + index
            wanted = tl.where(start == 0, value, 0.0)
            tl.store(at + column, wanted, mask=(row < count) & (column < shrink.width))


@triton.jit
def sum_partials_kernel(
    partial, shrinks, rows, chunks, ROWS: constexpr, RANK: constexpr
):  # fmt: skip
    """Add the chunks of `store_partial` in order, ROWS rows a program."""
    first = tl.program_id(0) * ROWS
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    index = tl.arange(0, RANK)[None, :]
    number: constexpr = len(shrinks)
    sums = ()
    full = ()
    for i in tl.static_range(number):
        total = tl.full([ROWS, RANK], 0.0, tl.float32)
        for chunk in range(chunks):
            at = tl.full([1, 1], rows, tl.int64) * chunk + row
            pointers = partial + at * (number * RANK) + i * RANK + index
            total += tl.load(pointers, mask=row < rows, other=0.0)
        sums += (total,)
        full += (RANK,)
    store_sums(sums, shrinks, full, first, rows - first, ROWS, RANK)
