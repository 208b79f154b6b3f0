"""RMSNorm and static FP8 quantisation in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .numerics import launch_options, load_bf16, round_bf16, store_e4m3


@triton.jit
def _inverse_rms(squares, columns, eps):
    # The order of a float64 sum does not show in float32: any block size gives a row the same
    # bytes.
    mean = tl.div_rn(tl.sum(squares, axis=0).to(tl.float32), columns.to(tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _square(value):
    # Exact in float32 for a bfloat16, where it may over- or underflow as the model's own does.
    return (value * value).to(tl.float64)


@triton.jit
def _scaled(value, gain, inv_rms, GEMMA: tl.constexpr):
    normed = value * inv_rms
    if GEMMA:
        out = round_bf16(normed * (1.0 + gain))
    else:
        out = round_bf16(gain * round_bf16(normed))
    return out


@triton.jit
def rms_norm_e4m3_kernel(
    x,
    weight,
    scale,
    codes,
    columns,
    x_stride,
    eps,
    GEMMA: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``codes = e4m3(rms_norm(x) / scale)``: one row a program, read once if it fits a block."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * columns
    lane = tl.arange(0, BLOCK)
    if ONE_BLOCK:
        mask = lane < columns
        value = load_bf16(x + lane, mask)
        inv_rms = _inverse_rms(_square(value), columns, eps)
        gain = load_bf16(weight + lane, mask)
        store_e4m3(codes + lane, _scaled(value, gain, inv_rms, GEMMA), scale, mask)
    else:
        squares = tl.zeros([BLOCK], tl.float64)
        for start in range(0, columns, BLOCK):
            column = start + lane
            squares += _square(load_bf16(x + column, column < columns))
        inv_rms = _inverse_rms(squares, columns, eps)
        for start in range(0, columns, BLOCK):
            column = start + lane
            mask = column < columns
            value = load_bf16(x + column, mask)  # a second time, but from the cache
            gain = load_bf16(weight + column, mask)
            store_e4m3(codes + column, _scaled(value, gain, inv_rms, GEMMA), scale, mask)


def rms_norm_e4m3(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    codes: torch.Tensor,
    rows: int,
    columns: int,
    stride: int,
    *,
    eps: float,
    gemma: bool,
) -> None:
    """Launch the RMSNorm kernel.

    Args:
        x: bfloat16, `rows` rows of `columns` neighbours, `stride` elements apart.
        weight: bfloat16 (columns,), contiguous.
        scale: float32 (1,), on the device of `x`.
        codes: float8_e4m3fn, contiguous; written.
        rows: number of rows; 0 launches nothing.
        columns: elements in a row; 0 launches nothing.
        stride: elements from one row of `x` to the next.
        eps: added to the mean of squares.
        gemma: the order ``round(x / rms * (1 + weight))``, else ``weight * round(x / rms)``.
    """
    if rows * columns == 0:
        return
    options = launch_options(columns)
    options.update(GEMMA=gemma, ONE_BLOCK=columns <= options["BLOCK"])
    rms_norm_e4m3_kernel[(rows,)](x, weight, scale, codes, columns, stride, eps, **options)
