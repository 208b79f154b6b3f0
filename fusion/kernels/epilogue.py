"""What kernels make of a tile of the raw activation: codes, scales and raw rows.

A tile is float32 (ROWS, BLOCK), rounded to bfloat16, and 0 outside the activation: columns beyond
the last one, and rows that only pad the codes or the scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .numerics import (
    amax,
    constexpr,
    encode_e2m1_pairs,
    encode_e4m3,
    fp8_scale,
    narrow_bf16,
    nvfp4_scale,
    reciprocal,
)


class Codes(NamedTuple):
    """What codes are made; a constant of the compiled kernel.

    Attributes:
        kind: `QuantKey.epilogue`, or "none" for raw or shrunk rows only.
        group: columns that share a scale, where it is not all of them; else 0.
        ue8m0: FP8 scales are powers of two.
        exponents: their exponents are stored, as bytes.
        swizzled: scales lie in tiles of 128 rows and 4 groups.
    """

    kind: str
    group: int = 0
    ue8m0: bool = False
    exponents: bool = False
    swizzled: bool = False


class Targets(NamedTuple):
    """Where outputs go; None for what is not written.

    Attributes:
        codes: bytes.
        codes_stride: bytes of a row.
        code_rows: rows, padding included.
        scale: float32, or bytes; measured scales.
        scale_rows: rows, padding included.
        scale_groups: columns, padding included.
        row_stride: elements from one row of scales to the next.
        group_stride: as `row_stride`, for columns.
        given: float32 (1,), the static or the global scale.
        raw: bfloat16 (..., K), contiguous.
        raw_map: int32 (R,), which T raw rows the rows of a request are; None where all are written.
    """

    codes: Any = None
    codes_stride: int = 0
    code_rows: int = 0
    scale: Any = None
    scale_rows: int = 0
    scale_groups: int = 0
    row_stride: int = 0
    group_stride: int = 0
    given: Any = None
    raw: Any = None
    raw_map: Any = None


class Place(NamedTuple):
    """Where a tile lies, within a kernel: what it computes, and what it has to write.

    Attributes:
        row: int64 (ROWS, 1).
        live: (ROWS, 1), rows of the activation.
        written: (ROWS, 1), these and the rows that pad codes or scales.
        start: its first column.
    """

    row: Any
    live: Any
    written: Any
    start: Any


# --- raw -----------------------------------------------------------------------------------------


@triton.jit
def store_raw(tile, targets, place, columns, per_request, BLOCK: constexpr):
    """The rows that somebody asked for, and no other."""
    row, mask = place.row, place.live
    if targets.raw_map is not None:
        request = row // per_request
        taken = tl.load(targets.raw_map + request, mask=mask, other=-1)
        mask = mask & (taken >= 0)
        row += (taken - request) * per_request
    column = place.start + tl.arange(0, BLOCK)[None, :]
    mask = mask & (column < columns)
    tl.store(targets.raw + row * columns + column, narrow_bf16(tile), mask=mask)


# --- codes ---------------------------------------------------------------------------------------


@triton.jit
def store_codes(
    tile, largest, targets, place, columns, CODES: constexpr, ROWS: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """The codes of a tile, and its scales; `largest` is the amax of its rows, (ROWS, 1)."""
    per_byte: constexpr = 2 if CODES.kind == "nvfp4" else 1
    if CODES.kind == "static":
        codes = encode_e4m3(tile * reciprocal(tl.load(targets.given)))
    elif CODES.kind == "token":
        scale = fp8_scale(largest, CODES.ue8m0)
        codes = encode_e4m3(tile * reciprocal(scale))
        _store_scales(scale, targets, place, 1, CODES, 1)
    else:
        groups: constexpr = BLOCK // CODES.group
        blocks = tl.reshape(tile, [ROWS, groups, CODES.group])
        largest = amax(blocks, 2)
        if CODES.kind == "group":
            scale = fp8_scale(largest, CODES.ue8m0)
            scaled = blocks * reciprocal(scale)[:, :, None]
            codes = tl.reshape(encode_e4m3(scaled), [ROWS, BLOCK])
        else:
            tl.static_assert(CODES.kind == "nvfp4")
            global_scale = tl.load(targets.given)
            scale = nvfp4_scale(largest, global_scale)
            scaled = blocks * reciprocal(scale * global_scale)[:, :, None]
            low, high = tl.split(tl.reshape(scaled, [ROWS, BLOCK // 2, 2]))
            codes = encode_e2m1_pairs(low, high)
        used = tl.cdiv(columns, CODES.group)
        _store_scales(scale, targets, place, used, CODES, groups)
    _store_bytes(codes, targets, place, per_byte, BLOCK // per_byte)


@triton.jit
def _store_bytes(codes, targets, place, PER_BYTE: constexpr, WIDTH: constexpr):
    # The compiler loses track of a quotient, and would store byte by byte.
    start = tl.multiple_of(place.start // PER_BYTE, WIDTH)
    column = start + tl.arange(0, WIDTH)[None, :]
    mask = (column < targets.codes_stride) & place.written & (place.row < targets.code_rows)
    tl.store(targets.codes + place.row * targets.codes_stride + column, codes, mask=mask)


@triton.jit
def _store_scales(scale, targets, place, used, CODES: constexpr, GROUPS: constexpr):
    """Scales (ROWS, GROUPS), of which `used` are of columns that there are; zeros beyond."""
    if CODES.kind == "token":
        # Whoever handles the first columns writes it; beyond `used` lies nothing.
        group = place.start + tl.arange(0, 1)[None, :]
    else:
        group = place.start // CODES.group + tl.arange(0, GROUPS)[None, :]
    row = place.row
    if CODES.swizzled:
        tile_of = row // 128 * (targets.scale_groups // 4) + group // 4
        at = tile_of * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
    else:
        at = row * targets.row_stride + group * targets.group_stride
    if CODES.kind == "nvfp4":
        value = encode_e4m3(scale)
    elif CODES.exponents:
        value = (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8)
    else:
        value = scale
    value = tl.where(place.live & (group < used), value, 0)
    mask = (group < targets.scale_groups) & place.written & (row < targets.scale_rows)
    tl.store(targets.scale + at, value.to(targets.scale.dtype.element_ty), mask=mask)
