"""How a launch is cut into programs: pure functions of shapes.

Without a shrink a program handles one row: a part of it, or, where the row decides what is made of
its elements (a norm, a scale per token), all of it at once, in registers.  Rows wider than
`_WIDEST` are read again from the cache for that.  With a shrink a program handles up to sixteen
rows of a request, a block of columns after the other, and reads rows that decide a second time;
where rows are few it handles one chunk of the columns only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

from .epilogue import Codes
from .shrink import TILE

#: Contracting a product and a sum into one rounding would change bytes.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}

_ELEMENTS_PER_WARP = 512  # 16 bfloat16, two 128-bit loads, one store, for each of 32 threads
_PART = 2048
_WIDEST = 16384
_LOOP_BLOCK = 4096
_SHRINK_BLOCK = 128
_SHRINK_WARPS = 8
_CHUNK = 1024
#: Columns of sums of all consumers up to which their A matrices are loaded a block ahead; every
#: architecture has the shared memory for that.
_AHEAD = 256
#: Programs that keep a GPU busy without chunks.
_ENOUGH_PROGRAMS = 256
_WHOLE_ROW = 1 << 30


class Plan(NamedTuple):
    """Constants of the compiled kernel.

    Attributes:
        rows: of a tile.
        block: columns of a tile.
        single: a program handles one tile, and reads it once.
        chunk: columns whose products are added before those of the next chunk.
        split: a program handles one chunk and writes its sums; otherwise all of them.
        rank: columns of the sums, for each consumer; 0 without a shrink.
        pieces: bfloat16 that an element of A is the sum of: 1, or 3 for a wider dtype.
        padded: there are rows that only pad codes or scales.
    """

    rows: int
    block: int
    single: bool
    chunk: int = 0
    split: bool = False
    rank: int = 0
    pieces: int = 1
    padded: bool = False


class Shape(NamedTuple):
    """Sizes that one compiled kernel serves all of.

    Attributes:
        rows: of the activation.
        columns: of the activation.
        covered: columns, and those that only pad the scales.
        per_request: rows of each request.
        tiles: of the activation's rows; more only pad.
        parts: programs for each of them.
    """

    rows: int
    columns: int
    covered: int
    per_request: int
    tiles: int
    parts: int


class Launch(NamedTuple):
    """A plan, what it is a plan for, how many programs that takes, and how they are compiled."""

    plan: Plan
    shape: Shape
    programs: int
    warps: int
    stages: int

    @property
    def chunks(self) -> int:
        """Chunks of the columns, those that only pad scales included."""
        return triton.cdiv(self.shape.covered, self.plan.chunk)


def plan_launch(
    rows: int,
    columns: int,
    codes: Codes,
    *,
    by_row: bool,
    total_rows: int,
    scale_groups: int = 0,
    requests: int = 1,
    rank: int = 0,
    consumers: int = 0,
    pieces: int = 1,
) -> Launch:
    """Cut `rows` times `columns` into programs.

    Args:
        rows: of the activation, at least 1.
        columns: of the activation.
        codes: what is made of it.
        by_row: what is computed of an element depends on its whole row.
        total_rows: with those that only pad.
        scale_groups: columns of the scales, padding included; 0 without block scales.
        requests: how many the rows belong to.
        rank: the highest rank to shrink to; 0 for no shrink.
        consumers: how many shrinks.
        pieces: bfloat16 that an element of A is the sum of.
    """
    covered = max(columns, scale_groups * codes.group, 1)
    padded = total_rows > rows
    per_request = rows // requests
    by_row = by_row or codes.kind == "token"
    if rank:
        plan = _shrink_plan(rows, requests, columns, codes, rank, pieces)
        tiles = requests * triton.cdiv(per_request, plan.rows)
        parts = triton.cdiv(covered, plan.chunk) if plan.split else 1
    else:
        plan = _row_plan(covered, codes, by_row=by_row)
        tiles = rows
        parts = 1 if by_row else triton.cdiv(covered, plan.block)
    shape = Shape(rows, columns, covered, per_request, tiles, parts)
    tiles += triton.cdiv(total_rows - rows, plan.rows)
    warps = _SHRINK_WARPS if rank else max(1, min(16, plan.rows * plan.block // _ELEMENTS_PER_WARP))
    # Where programs are many, others hide what one waits for.
    ahead = plan.split and pieces == 1 and consumers * plan.rank <= _AHEAD
    stages = 2 if ahead else 1
    return Launch(plan._replace(padded=padded), shape, tiles * parts, warps, stages)


def _row_plan(covered: int, codes: Codes, *, by_row: bool) -> Plan:
    block = max(triton.next_power_of_2(covered), codes.group, 2)
    if not by_row:
        return Plan(1, min(block, max(_PART, codes.group)), single=True)
    if block <= _WIDEST:
        return Plan(1, block, single=True)
    return Plan(1, _LOOP_BLOCK, single=False, chunk=_WHOLE_ROW)


def _shrink_plan(
    rows: int, requests: int, columns: int, codes: Codes, rank: int, pieces: int
) -> Plan:
    tile_rows = 1 if rows == requests else TILE
    tiles = requests * triton.cdiv(rows // requests, tile_rows)
    return Plan(
        tile_rows,
        max(_SHRINK_BLOCK // (1 if pieces == 1 else 2), codes.group),
        single=False,
        chunk=_CHUNK,
        split=columns > _CHUNK and tiles < _ENOUGH_PROGRAMS,
        rank=max(TILE, triton.next_power_of_2(rank)),
        pieces=pieces,
    )
