"""FP8 codes of pairs times FP8 codes of their experts in one Triton kernel, and its launch.

Each tile is one of a linear's: the same columns of K in the same order, by the same instructions.
Which rows lie beside each other in it shows in no result, so none hangs on how many an expert has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ....kernels.triton.plan import OPTIONS, STEP, MatmulPlan, plan_matmul
from ....kernels.triton.tile import Operand, store_tile, tile_sum
from ...pairs import Pairs

if TYPE_CHECKING:
    # Within a kernel a constant is what was passed, not the box that it came in.
    constexpr = Any
else:
    constexpr = tl.constexpr


class GroupedShape(NamedTuple):
    """Sizes that one compiled kernel serves all of: E, N and K, and the weights' strides.

    Attributes:
        experts: E.
        channels: N.
        columns: K.
        scale_stride: elements of the weights' scales from one expert to the next.
    """

    experts: int
    channels: int
    columns: int
    scale_stride: int


@triton.jit
def _find_tile(offsets, experts, tile, ROWS: constexpr, EXPERTS: constexpr):
    """Expert, first position and end of the expert's positions; `EXPERTS` where there is no tile.

    Every program works it out by itself: a table would be one more launch, which few tokens, whose
    launches take longer than their sums, would wait for.
    """
    index = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + index, mask=index < experts, other=0)
    end = tl.load(offsets + index + 1, mask=index < experts, other=0)
    tiles = tl.cdiv(end - begin, ROWS)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    here = index == expert
    first = tl.sum(tl.where(here, begin, 0), 0)
    last = tl.sum(tl.where(here, end, 0), 0)
    before = tl.sum(tl.where(index < expert, tiles, 0), 0)
    return expert, first + (tile - before) * ROWS, last


@triton.jit
def grouped_matmul_kernel(
    x, token, weight, bias, out, offsets, shape, BLOCKWISE: constexpr, TILE_IN_BLOCK: constexpr,
    EXPERTS: constexpr, PLAN: constexpr,
):  # fmt: skip
    """One tile of the output, (channels, positions), of one expert.

    Args:
        x: an `Operand`, of the activation; its scales lie by position.
        token: int64 (P,), the row of codes that each position reads; None for its own.
        weight: an `Operand`, of all experts.
        bias: float32 (E, N), or None.
        out: (P, N), contiguous.
        offsets: int32 (E + 1,), where each expert's positions begin.
        shape: a `GroupedShape`.
        BLOCKWISE: both sides have scales that change along K.
        TILE_IN_BLOCK: all channels of a tile share their scales.
        EXPERTS: E or more, a power of two.
        PLAN: a `MatmulPlan`.
    """
    expert, first, last = _find_tile(offsets, shape.experts, tl.program_id(0), PLAN.rows, EXPERTS)
    # Where there is no tile, nothing is summed and no position is live.  To return here would take
    # registers that the widest tile needs.
    end = tl.where(expert < shape.experts, shape.columns, 0)
    own = tl.minimum(expert, shape.experts - 1).to(tl.int64)
    position = first + tl.arange(0, PLAN.rows)
    channel = tl.program_id(1) * PLAN.channels + tl.arange(0, PLAN.channels)
    live, live_channel = position < last, channel < shape.channels
    row = position
    if token is not None:
        row = tl.load(token + position, mask=live, other=0)
    total = tile_sum(
        x.codes + row.to(tl.int64) * shape.columns,
        weight.codes + (own * shape.channels + channel) * shape.columns,
        x, weight, weight.scale + own * shape.scale_stride, position, channel, live, live_channel,
        shape.columns, end, BLOCKWISE, TILE_IN_BLOCK, PLAN,
    )  # fmt: skip
    if bias is not None:
        bias += own * shape.channels
    store_tile(total, bias, out, position, channel, live, live_channel, shape.channels)


def plan_pairs(
    pairs: int, experts: int, columns: int, *, one_scale: bool = True
) -> tuple[MatmulPlan, int]:
    """The tiles for that many pairs, at least 1, and a bound on how many there are; pure.

    Of as many rows as an expert has on average.  How many each has is known to the device alone:
    experts end within a tile, so that there may be one more for each that some pair chose.

    Args:
        pairs: P.
        experts: E.
        columns: K.
        one_scale: as in `plan_matmul`.
    """
    plan = plan_matmul(triton.cdiv(pairs, experts), columns, one_scale=one_scale)
    chosen = min(pairs, experts)
    return plan, (pairs + chosen * (plan.rows - 1)) // plan.rows


def by_position(x: Operand, pairs: Pairs) -> Operand:
    """Scales (T, groups) of tokens, repeated for their pairs.

    The kernel gathers codes, but not these: a tensor core's layout has some of every row's in each
    thread, and an address for each would take the registers of the sums.
    """
    if not x.row_stride:
        return x
    scale = x.scale.t()[:, pairs.token]
    return x._replace(scale=scale, row_stride=1, group_stride=x.group_stride and len(pairs))


def launch_grouped_matmul(
    x: Operand,
    weight: Operand,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    pairs: Pairs,
    *,
    by_token: bool,
    blockwise: bool,
) -> None:
    """Fill the rows of `out` that some expert computes; nothing waits for the device.

    Args:
        x: of the activation; its codes may have more rows, which only pad, and its scales lie by
            position.
        weight: codes (E, N, K), scales contiguous.
        bias: float32 (E, N), contiguous, or None.
        out: (P, N), bfloat16, float16 or float32, contiguous.
        pairs: who computes what.
        by_token: the codes of a pair are its token's, else its position's.
        blockwise: scales change every `STEP` columns, on both sides.
    """
    experts, channels, columns = weight.codes.shape
    if not len(pairs) or not channels:
        return
    one_scale = not blockwise or weight.block_rows % STEP == 0
    plan, tiles = plan_pairs(len(pairs), experts, columns, one_scale=one_scale)
    kernel: Any = grouped_matmul_kernel
    kernel[(tiles, triton.cdiv(channels, plan.channels))](
        x,
        pairs.token if by_token else None,
        weight,
        bias,
        out,
        pairs.offsets,
        GroupedShape(experts, channels, columns, weight.scale[0].numel()),
        BLOCKWISE=blockwise,
        TILE_IN_BLOCK=weight.block_rows % plan.channels == 0,
        EXPERTS=triton.next_power_of_2(experts),
        PLAN=plan,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **OPTIONS,
    )
