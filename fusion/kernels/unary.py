"""Unary activation and static FP8 quantisation in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .numerics import launch_options, load_bf16, round_bf16, store_e4m3


@triton.jit
def relu2_e4m3_kernel(x, scale, codes, columns, x_stride, BLOCK: tl.constexpr):
    """``codes = e4m3(round(relu(x) ** 2) / scale)``: BLOCK columns of one row a program."""
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    value = load_bf16(x + row * x_stride + column, mask)
    positive = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    value = round_bf16(positive * positive)
    store_e4m3(codes + row * columns + column, value, scale, mask)


def relu2_e4m3(
    x: torch.Tensor, scale: torch.Tensor, codes: torch.Tensor, rows: int, columns: int, stride: int
) -> None:
    """Launch the ReLU² kernel.

    Args:
        x: bfloat16, `rows` rows of `columns` neighbours, `stride` elements apart.
        scale: float32 (1,), on the device of `x`.
        codes: float8_e4m3fn, contiguous; written.
        rows: number of rows; 0 launches nothing.
        columns: elements in a row; 0 launches nothing.
        stride: elements from one row of `x` to the next.
    """
    if rows * columns == 0:
        return
    options = launch_options(columns)
    grid = (rows * triton.cdiv(columns, options["BLOCK"]),)
    relu2_e4m3_kernel[grid](x, scale, codes, columns, stride, **options)
