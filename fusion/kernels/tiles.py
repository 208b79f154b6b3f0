"""The one loop of all producers: read a tile, make the raw activation of it, emit what is asked."""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import Place, store_codes, store_raw
from .numerics import amax, constexpr, narrow_bf16
from .shrink import (
    add_sums,
    join_pieces,
    load_bases,
    load_ranks,
    load_slots,
    multiply,
    store_partial,
    store_sums,
    zero_sums,
)
from .sources import (
    finish_norm,
    inverse_deviation,
    inverse_rms,
    mean_of,
    read_activation,
    read_norm,
    sum_rows,
    sum_spread,
    sum_squares,
)


@triton.jit
def _read(source, place, columns, OP: constexpr, NORM: constexpr, PLAN: constexpr):
    """What a tile is made of (of an activation: the tile itself) and where it may be read."""
    column = place.start + tl.arange(0, PLAN.block)[None, :]
    mask = column < columns
    if PLAN.padded or PLAN.rank:
        mask = mask & place.live
    if NORM:
        x = read_norm(source, place.row, column, mask)
    else:
        x = read_activation(source, place.row, column, mask, OP)
    return x, mask


@triton.jit
def _statistics(source, x, mask, columns, ORDER: constexpr):
    """Mean and inverse of rows that lie in `x` whole."""
    if ORDER == "llama" or ORDER == "gemma":
        mean = 0.0
        inverse = inverse_rms(sum_squares(x), columns, source.eps)
    else:
        wide = mean_of(sum_rows(x), columns)
        mean = wide.to(tl.float32)
        inverse = inverse_deviation(sum_spread(x, wide, mask), columns, source.eps)
    return mean, inverse


@triton.jit
def _statistics_of_rows(
    source, place, columns, ORDER: constexpr, PLAN: constexpr
):  # fmt: skip
    """Mean and inverse of rows that are read a block at a time: once, or twice for LayerNorm."""
    total = tl.full([PLAN.rows, 1], 0.0, tl.float64)
    mean = 0.0
    if ORDER == "llama" or ORDER == "gemma":
        for start in range(0, columns, PLAN.block):
            x, _ = _read(source, _at(place, start), columns, ORDER, True, PLAN)
            total += sum_squares(x)
        inverse = inverse_rms(total, columns, source.eps)
    else:
        spread = tl.full([PLAN.rows, 1], 0.0, tl.float64)
        for start in range(0, columns, PLAN.block):
            x, _ = _read(source, _at(place, start), columns, ORDER, True, PLAN)
            total += sum_rows(x)
        wide = mean_of(total, columns)
        for start in range(0, columns, PLAN.block):
            x, mask = _read(source, _at(place, start), columns, ORDER, True, PLAN)
            spread += sum_spread(x, wide, mask)
        mean = wide.to(tl.float32)
        inverse = inverse_deviation(spread, columns, source.eps)
    return mean, inverse


@triton.jit
def _finish(
    source, x, mask, statistics, place, columns, OP: constexpr, NORM: constexpr,
    PLAN: constexpr,
):  # fmt: skip
    """The raw activation of a tile, 0 outside."""
    if NORM:
        column = place.start + tl.arange(0, PLAN.block)[None, :]
        x = finish_norm(source, x, statistics[0], statistics[1], column, column < columns, OP)
    return tl.where(mask, x, 0.0)


@triton.jit
def _store_added(source, x, mask, place, columns, PLAN: constexpr):
    column = place.start + tl.arange(0, PLAN.block)[None, :]
    tl.store(source.added + place.row * columns + column, narrow_bf16(x), mask=mask)


@triton.jit
def _emit(
    tile, largest, targets, place, shape, CODES: constexpr, PLAN: constexpr
):  # fmt: skip
    if targets.raw is not None:
        store_raw(tile, targets, place, shape.columns, shape.per_request, PLAN.block)
    if CODES.kind != "none":
        store_codes(tile, largest, targets, place, shape.columns, CODES, PLAN.rows, PLAN.block)


@triton.jit
def _at(place, start):
    return Place(place.row, place.live, place.written, start)


@triton.jit
def _locate(tile, shape, PLAN: constexpr):
    """The rows of a tile: where they lie, their request, the first and how many there are."""
    lane = tl.arange(0, PLAN.rows)[:, None]
    if PLAN.rank:
        per_request = tl.cdiv(shape.per_request, PLAN.rows)
        request = tile // per_request
        within = tile % per_request * PLAN.rows
        first = request * shape.per_request + within
        count = tl.minimum(shape.per_request - within, PLAN.rows)
    else:
        request = 0
        first = tile
        count = 1
    written = count
    if PLAN.padded:
        padding = tile >= shape.tiles
        first = tl.where(padding, shape.rows + (tile - shape.tiles) * PLAN.rows, first)
        written = tl.where(padding, PLAN.rows, count)
        count = tl.where(padding, 0, count)
    row = (first + lane).to(tl.int64)
    start = tl.full([], 0, tl.int32)
    return Place(row, lane < count, lane < written, start), request, first, count


@triton.jit
def emit_tile(
    source, targets, place, shape, OP: constexpr, NORM: constexpr, CODES: constexpr,
    PLAN: constexpr,
):  # fmt: skip
    """A program that handles one tile: every element is read once."""
    x, mask = _read(source, place, shape.columns, OP, NORM, PLAN)
    statistics = (0.0, 0.0)
    largest = 0.0
    if NORM:
        if source.added is not None:
            _store_added(source, x, mask, place, shape.columns, PLAN)
        statistics = _statistics(source, x, mask, shape.columns, OP)
    tile = _finish(source, x, mask, statistics, place, shape.columns, OP, NORM, PLAN)
    if CODES.kind == "token":
        largest = amax(tile, 1)[:, None]
    _emit(tile, largest, targets, place, shape, CODES, PLAN)


@triton.jit
def emit_rows(
    source, targets, shrinks, partial, place, request, first, count, part, shape,
    OP: constexpr, NORM: constexpr, CODES: constexpr, PLAN: constexpr,
):  # fmt: skip
    """A program that handles rows block by block, or one chunk of their columns."""
    columns = shape.columns
    statistics = (0.0, 0.0)
    if NORM:
        statistics = _statistics_of_rows(source, place, columns, OP, PLAN)
    largest = tl.full([PLAN.rows, 1], 0.0, tl.float32)
    if CODES.kind == "token":
        for start in range(0, shape.covered, PLAN.block):
            x, mask = _read(source, _at(place, start), columns, OP, NORM, PLAN)
            x = _finish(source, x, mask, statistics, _at(place, start), columns, OP, NORM, PLAN)
            largest = tl.maximum(largest, amax(x, 1)[:, None])
    slots = load_slots(shrinks, request, count > 0)
    bases = load_bases(shrinks, slots)
    ranks = load_ranks(shrinks, slots)
    totals = zero_sums(len(shrinks), PLAN.rank)
    chunks = 1 if PLAN.split else tl.cdiv(shape.covered, PLAN.chunk)
    for chunk in range(part, part + chunks):
        sums = zero_sums(len(shrinks) * PLAN.pieces, PLAN.rank)
        end = tl.minimum((chunk + 1) * PLAN.chunk, shape.covered)
        for start in range(chunk * PLAN.chunk, end, PLAN.block):
            here = _at(place, start)
            x, mask = _read(source, here, columns, OP, NORM, PLAN)
            if NORM and source.added is not None:
                _store_added(source, x, mask, here, columns, PLAN)
            tile = _finish(source, x, mask, statistics, here, columns, OP, NORM, PLAN)
            _emit(tile, largest, targets, here, shape, CODES, PLAN)
            if PLAN.rank:
                sums = multiply(tile, sums, shrinks, bases, ranks, start, columns, PLAN)
        sums = join_pieces(sums, PLAN.pieces)
        if PLAN.split:
            store_partial(sums, partial, ranks, chunk, shape.rows, first, count, PLAN.rank)
        else:
            totals = add_sums(totals, sums)
    if PLAN.rank and not PLAN.split:
        store_sums(totals, shrinks, ranks, first, count, 16, PLAN.rank)


@triton.jit
def emit(
    source, targets, shrinks, partial, shape, OP: constexpr, NORM: constexpr,
    CODES: constexpr, PLAN: constexpr,
):  # fmt: skip
    """What one program writes."""
    part = tl.program_id(0) % shape.parts
    tile = tl.program_id(0) // shape.parts
    place, request, first, count = _locate(tile, shape, PLAN)
    if PLAN.single:
        place = _at(place, part * PLAN.block)
        emit_tile(source, targets, place, shape, OP, NORM, CODES, PLAN)
    else:
        emit_rows(
            source, targets, shrinks, partial, place, request, first, count, part, shape,
            OP, NORM, CODES, PLAN,
        )  # fmt: skip
