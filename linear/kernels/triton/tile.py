"""One tile of FP8 codes times FP8 codes: what the kernels of linears and of experts share.

Sums in a tensor core span `STEP` columns, in float32 between: block scales change no more often,
and Hopper's FP8 instructions, which add with fewer bits, are never trusted with more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from ....core.quantized_activation import QuantizedActivation
from ....core.scheme import WeightScheme
from .plan import STEP

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
        codes: float8_e4m3fn (rows, K), of experts (E, rows, K), contiguous.
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


def input_operand(x: QuantizedActivation) -> Operand:
    """Of codes with a scale in all, a token, or `STEP` columns of one."""
    codes = x.codes.reshape(-1, x.codes.shape[-1]).contiguous()
    if not x.quant_key.granularity.size:
        return Operand(codes, x.scale.contiguous(), int(not x.quant_key.static))
    return Operand(codes, x.scale, x.scale.stride(0), x.scale.stride(1))


def weight_operand(codes: torch.Tensor, scale: torch.Tensor, scheme: WeightScheme) -> Operand:
    """Of a linear, codes (N, K) and float32 scales of `scheme`, or of experts, (E, N, K)."""
    if scheme.blockwise:
        return Operand(codes, scale, scale.stride(-2), 1, scheme.rows)
    return Operand(codes, scale, int(scheme.per_channel))


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
def _scales(scale, operand, row, live, group, TILE_IN_BLOCK: constexpr):
    """Of the rows of a tile; of all of them at once where they lie in one block."""
    at = scale + group * operand.group_stride
    if TILE_IN_BLOCK:
        first = tl.min(row, axis=0, keep_dims=True) // operand.block_rows
        found = tl.load(at + first * operand.row_stride)
    else:
        found = tl.load(at + row // operand.block_rows * operand.row_stride, mask=live, other=0.0)
    return found


@triton.jit
def tile_sum(
    codes, weights, x, weight, weight_scale, row, channel, live_row, live_channel, columns, end,
    BLOCKWISE: constexpr, TILE_IN_BLOCK: constexpr, PLAN: constexpr,
):  # fmt: skip
    """float32 (channels, rows) of a tile, all scales applied.

    Args:
        codes: where the codes of each row of the activation begin.
        weights: where those of each channel do.
        x: an `Operand`, of the activation; how its scales lie.
        weight: an `Operand`; how its scales lie.
        weight_scale: where they begin.
        row: rows of the activation's scales.
        channel: rows of the weight.
        live_row: which of them there are.
        live_channel: the same.
        columns: K.
        end: K, or 0 for no sum at all.
        BLOCKWISE: both sides have scales that change along K.
        TILE_IN_BLOCK: all channels of a tile share their scales.
        PLAN: a `MatmulPlan`.
    """
    step = tl.arange(0, _STEP)
    codes = codes[None, :] + step[:, None]
    weights = weights[:, None] + step[None, :]
    total = tl.full([PLAN.channels, PLAN.rows], 0.0, tl.float32)
    for start in range(0, end, _STEP):
        left = columns - start
        w = tl.load(weights + start, mask=live_channel[:, None] & (step < left)[None, :], other=0.0)
        c = tl.load(codes + start, mask=live_row[None, :] & (step < left)[:, None], other=0.0)
        part = _multiply(w, c)
        if BLOCKWISE:
            group = start // _STEP
            x_scale = _scales(x.scale, x, row, live_row, group, False)
            w_scale = _scales(weight_scale, weight, channel, live_channel, group, TILE_IN_BLOCK)
            total = tl.fma(part, x_scale[None, :] * w_scale[:, None], total)
        else:
            total += part
    if not BLOCKWISE:
        x_scale = _scales(x.scale, x, row, live_row, 0, False)
        w_scale = _scales(weight_scale, weight, channel, live_channel, 0, TILE_IN_BLOCK)
        total *= x_scale[None, :] * w_scale[:, None]
    return total


@triton.jit
def store_tile(total, bias, out, row, channel, live_row, live_channel, channels):
    """Add the bias, round once, and write.

    Args:
        total: float32 (channels, rows).
        bias: float32, where the channels' own begins; or None.
        out: (M, N), contiguous.
        row: of `out`.
        channel: the same.
        live_row: which of them there are.
        live_channel: the same.
        channels: N.
    """
    if bias is not None:
        total += tl.load(bias + channel, mask=live_channel, other=0.0)[:, None]
    at = out + row[None, :].to(tl.int64) * channels + channel[:, None]
    narrow = _narrow(total, out.dtype.element_ty)
    tl.store(at, narrow, mask=live_row[None, :] & live_channel[:, None])
