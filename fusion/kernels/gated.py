"""Gated activation and static FP8 quantisation in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .numerics import launch_options, load_bf16, round_bf16, silu, store_e4m3


@triton.jit
def silu_mul_e4m3_kernel(
    gate, up, scale, codes, columns, gate_stride, up_stride, BLOCK: tl.constexpr
):
    """``codes = e4m3(round(round(silu(gate)) * up) / scale)``: BLOCK columns of a row a program."""
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    activated = round_bf16(silu(load_bf16(gate + row * gate_stride + column, mask)))
    value = round_bf16(activated * load_bf16(up + row * up_stride + column, mask))
    store_e4m3(codes + row * columns + column, value, scale, mask)


def silu_mul_e4m3(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor,
    codes: torch.Tensor,
    rows: int,
    columns: int,
    strides: tuple[int, int],
) -> None:
    """Launch the SiLU * up kernel.

    Args:
        gate: bfloat16, `rows` rows of `columns` neighbours.
        up: as `gate`.
        scale: float32 (1,), on the device of `gate`.
        codes: float8_e4m3fn, contiguous; written.
        rows: number of rows; 0 launches nothing.
        columns: elements in a row; 0 launches nothing.
        strides: elements from one row to the next, of `gate` and of `up`.
    """
    if rows * columns == 0:
        return
    options = launch_options(columns)
    grid = (rows * triton.cdiv(columns, options["BLOCK"]),)
    silu_mul_e4m3_kernel[grid](gate, up, scale, codes, columns, *strides, **options)
