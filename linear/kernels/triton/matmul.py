"""FP8 codes times FP8 codes in one Triton kernel, and its launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from .plan import OPTIONS, STEP, plan_matmul
from .tile import Operand, store_tile, tile_sum

if TYPE_CHECKING:
    # Within a kernel a constant is what was passed, not the box that it came in.
    constexpr = Any
else:
    constexpr = tl.constexpr


class Shape(NamedTuple):
    """Sizes that one compiled kernel serves all of: M, N and K."""

    rows: int
    channels: int
    columns: int


@triton.jit
def matmul_kernel(
    x, weight, bias, out, shape, BLOCKWISE: constexpr, TILE_IN_BLOCK: constexpr,
    PLAN: constexpr,
):  # fmt: skip
    """One tile of the output, (channels, rows).

    Args:
        x: an `Operand`, of the activation.
        weight: an `Operand`.
        bias: float32 (N,), or None.
        out: (M, N), contiguous.
        shape: a `Shape`.
        BLOCKWISE: both sides have scales that change along K.
        TILE_IN_BLOCK: all channels of a tile share their scales.
        PLAN: a `MatmulPlan`.
    """
    # Neighbours share weights: of the two, they are the ones that no cache holds from before.
    tiles = tl.cdiv(shape.rows, PLAN.rows)
    row = tl.program_id(0) % tiles * PLAN.rows + tl.arange(0, PLAN.rows)
    channel = tl.program_id(0) // tiles * PLAN.channels + tl.arange(0, PLAN.channels)
    live_row, live_channel = row < shape.rows, channel < shape.channels
    total = tile_sum(
        x.codes + row.to(tl.int64) * shape.columns,
        weight.codes + channel.to(tl.int64) * shape.columns,
        x, weight, weight.scale, row, channel, live_row, live_channel,
        shape.columns, shape.columns, BLOCKWISE, TILE_IN_BLOCK, PLAN,
    )  # fmt: skip
    store_tile(total, bias, out, row, channel, live_row, live_channel, shape.channels)


def launch_matmul(
    x: Operand, weight: Operand, bias: torch.Tensor | None, out: torch.Tensor, *, blockwise: bool
) -> None:
    """Fill `out`.

    Args:
        x: of the activation; its codes may have more rows, which only pad.
        weight: codes (N, K).
        bias: float32 (N,), or None.
        out: (M, N), bfloat16, float16 or float32, contiguous.
        blockwise: scales change every `STEP` columns, on both sides.
    """
    rows, channels = out.shape
    if not rows or not channels:
        return
    columns = weight.codes.shape[1]
    one_scale = not blockwise or weight.block_rows % STEP == 0
    plan = plan_matmul(rows, columns, one_scale=one_scale)
    programs = triton.cdiv(rows, plan.rows) * triton.cdiv(channels, plan.channels)
    kernel: Any = matmul_kernel
    kernel[(programs,)](
        x,
        weight,
        bias,
        out,
        Shape(rows, channels, columns),
        BLOCKWISE=blockwise,
        TILE_IN_BLOCK=weight.block_rows % plan.channels == 0,
        PLAN=plan,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **OPTIONS,
    )
