"""FP8 codes times FP8 codes in one Triton kernel, and its launch.

Sums in a tensor core span `STEP` columns, in float32 between: block scales change no more often,
and Hopper's FP8 instructions, which add with fewer bits, are never trusted with more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from .plan import OPTIONS, STEP, plan_matmul

if TYPE_CHECKING:
    # Within a kernel a constant is what was passed, not the box that it came in.
    constexpr = Any
else:
    constexpr = tl.constexpr

_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_STEP = tl.constexpr(STEP)


class Operand(NamedTuple):
    """Codes of an activation or a weight, and their scales.

    Attributes:
        codes: float8_e4m3fn (rows, K), contiguous.
        scale: float32.
        row_stride: elements of `scale` from one row (or block of rows) to the next; 0 for one
            scale in all.
        group_stride: elements of `scale` from one group of columns to the next; 0 where scales do
            not change along K.
        block_rows: rows that share a scale.
    """

    codes: Any
    scale: Any
    row_stride: int
    group_stride: int = 0
    block_rows: int = 1


class Shape(NamedTuple):
    """Sizes that one compiled kernel serves all of: M, N and K."""

    rows: int
    channels: int
    columns: int


@triton.jit
def _multiply(weights, codes):
    """(channels, STEP) times (STEP, rows), summed in float32."""
    if _INTERPRETED:
        # The interpreter takes the code of a NaN for the number that it would be.
        product = tl.dot(_decode(weights), _decode(codes))
    else:
        product = tl.dot(weights, codes, max_num_imprecise_acc=_STEP)
    return product


@triton.jit
def _decode(codes):
    byte = codes.to(tl.uint8, bitcast=True)
    return tl.where(byte & 0x7F == 0x7F, float("nan"), codes.to(tl.float32))


@triton.jit
def _narrow(x, DTYPE: constexpr):
    """The nearest values of the output's dtype."""
    if _INTERPRETED and tl.bfloat16 == DTYPE:
        # The interpreter cuts float32 off instead of rounding it.
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, bits >> 16, 0x7FC0)
        narrow = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(DTYPE)
    return narrow


@triton.jit
def _scales(operand, row, live, group, TILE_IN_BLOCK: constexpr):
    """Of the rows of a tile; of all of them at once where they lie in one block."""
    at = operand.scale + group * operand.group_stride
    if TILE_IN_BLOCK:
        first = tl.min(row, axis=0, keep_dims=True) // operand.block_rows
        scale = tl.load(at + first * operand.row_stride)
    else:
        scale = tl.load(at + row // operand.block_rows * operand.row_stride, mask=live, other=0.0)
    return scale


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
    step = tl.arange(0, _STEP)
    codes = x.codes + row[None, :].to(tl.int64) * shape.columns + step[:, None]
    weights = weight.codes + channel[:, None].to(tl.int64) * shape.columns + step[None, :]
    total = tl.full([PLAN.channels, PLAN.rows], 0.0, tl.float32)
    for start in range(0, shape.columns, _STEP):
        left = shape.columns - start
        w = tl.load(weights + start, mask=live_channel[:, None] & (step < left)[None, :], other=0.0)
        c = tl.load(codes + start, mask=live_row[None, :] & (step < left)[:, None], other=0.0)
        part = _multiply(w, c)
        if BLOCKWISE:
            group = start // _STEP
            x_scale = _scales(x, row, live_row, group, False)
            w_scale = _scales(weight, channel, live_channel, group, TILE_IN_BLOCK)
            total = tl.fma(part, x_scale[None, :] * w_scale[:, None], total)
        else:
            total += part
    if not BLOCKWISE:
        x_scale = _scales(x, row, live_row, 0, False)
        w_scale = _scales(weight, channel, live_channel, 0, TILE_IN_BLOCK)
        total *= x_scale[None, :] * w_scale[:, None]
    if bias is not None:
        total += tl.load(bias + channel, mask=live_channel, other=0.0)[:, None]
    at = out + row[None, :].to(tl.int64) * shape.channels + channel[:, None]
    narrow = _narrow(total, out.dtype.element_ty)
    tl.store(at, narrow, mask=live_row[None, :] & live_channel[:, None])


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
