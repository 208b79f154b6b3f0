"""The base matmul by definition, in the orders of accumulation that our own kernels keep.

Products of two codes are exact in float32, and those of two bfloat16 are not rounded before they
are added, so the order of the sums is all there is to define: blocks of `BLOCK` columns (fewer
where scales change more often) are summed from the left, then the block sums.  A row's bytes
therefore depend neither on the number of rows nor on the vector width.

On AMX a tile instruction adds `TILE_COLUMNS` columns to a block sum at once: the even ones from the
left, the odd ones from the left, and the sum of the two.  It takes subnormals for zeros and makes
zeros of them; of codes there are none.  Blocks of bfloat16 have `TILE_BLOCK` columns there.
"""

from __future__ import annotations

import torch

from ...core.quantized_activation import QuantizedActivation
from ..quantized_weight import QuantizedWeight, spread_rows

#: Columns of one block sum.
BLOCK = 128
#: Columns that one AMX instruction adds up.
TILE_COLUMNS = 32
#: Columns of one block sum of bfloat16 on AMX: HALVES_DEPTH of native/amx.h.
TILE_BLOCK = 512
_LEAST_NORMAL = torch.finfo(torch.float32).tiny


def block_columns(weight_columns: int, input_columns: int) -> int:
    """Columns of a block sum, none of which a scale changes in.

    Args:
        weight_columns: that share a scale of the weight; 0 for all.
        input_columns: that share a scale of the input; 0 for all, or for no codes.
    """
    return min([BLOCK, *(size for size in (weight_columns, input_columns) if size)])


def tiles_serve(step: int) -> bool:
    """Whether block sums of `step` columns of codes are made on tiles, where there are tiles."""
    return step % TILE_COLUMNS == 0 and BLOCK % step == 0


def matmul(
    x: QuantizedActivation | torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    tiles: bool = False,
) -> torch.Tensor:
    """The base output: the definition, one column at a time.

    Args:
        x: FP8 codes (..., K), or a raw activation of at most 16 bits an element.
        weight: FP8 codes (N, K).
        bias: (N,), or None.
        tiles: the order of AMX, for the matmuls that it serves.

    Returns:
        (..., N) in the activation's dtype.
    """
    quantized = x if isinstance(x, QuantizedActivation) else None
    values = (x if quantized is None else quantized.codes).reshape(-1, weight.in_features).float()
    row_scale, row_group = _input_scales(quantized)
    w, step = weight.values(), block_columns(weight.scheme.columns, row_group)
    w_scale = weight.scales()
    total = values.new_zeros(values.shape[0], weight.out_features)
    for start in range(0, weight.in_features, step):
        end = min(start + step, weight.in_features)
        if tiles and quantized is not None and tiles_serve(step):
            part = _tile_sum(values[:, start:end], w[:, start:end])
        else:
            part = _sum_from_left(values[:, start:end], w[:, start:end])
        total = total + part * _block_scale(weight, w_scale, row_scale, row_group, start)
    if row_group == 0 and row_scale is not None:
        w_final = 1.0 if weight.scheme.blockwise else w_scale.reshape(1, -1)
        total = total * (row_scale * w_final)
    elif not weight.scheme.blockwise:
        total = total * w_scale.reshape(1, -1)
    if bias is not None:
        total = total + bias.float()
    dtype = x.orig_dtype if isinstance(x, QuantizedActivation) else x.dtype
    return total.to(dtype).reshape(*x.shape[:-1], weight.out_features)


def bfloat16_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, tiles: bool = False
) -> torch.Tensor:
    """The output of a linear in bfloat16 by the C kernels.

    Args:
        x: bfloat16 (M, K).
        weight: bfloat16 (N, K).
        bias: (N,), or None.
        tiles: on AMX.

    Returns:
        bfloat16 (M, N).
    """
    values, w = x.double(), weight.double()
    if tiles:
        values, w = _flushed(values), _flushed(w)
    total = torch.zeros(len(x), len(weight))
    step = TILE_BLOCK if tiles else BLOCK
    for start in range(0, weight.shape[1], step):
        block = slice(start, start + step)
        total = total + (_fused_tile_sum if tiles else _fused_sum)(values[:, block], w[:, block])
    if bias is not None:
        total = total + bias.float()
    return total.bfloat16()


def _fused_sum(values: torch.Tensor, weight: torch.Tensor, *, flush: bool = False) -> torch.Tensor:
    """Float32 (M, N) of float64 (M, K) and (N, K), whose products are exact; from the left."""
    part = torch.zeros(values.shape[0], weight.shape[0])
    for k in range(values.shape[1]):
        part = _rounded_sum(values[:, k, None] * weight[:, k], part.double())
        part = _flushed(part) if flush else part
    return part


def _fused_tile_sum(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    part = torch.zeros(values.shape[0], weight.shape[0])
    for start in range(0, values.shape[1], TILE_COLUMNS):
        x, w = values[:, start : start + TILE_COLUMNS], weight[:, start : start + TILE_COLUMNS]
        even = _fused_sum(x[:, ::2], w[:, ::2], flush=True)
        odd = _fused_sum(x[:, 1::2], w[:, 1::2], flush=True)
        part = _flushed(part + _flushed(even + odd))
    return part


def _rounded_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Float32 of the sum of two float64, rounded once.

    A sum that float64 does not hold goes to that neighbour whose last bit is set, so that it cannot
    pass for a number halfway between two float32.
    """
    total = a + b
    kept = total - a
    lost = (a - (total - kept)) + (b - kept)
    even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.copysign(torch.full_like(lost, torch.inf), lost))
    return torch.where((lost != 0) & even & total.isfinite(), odd, total).float()


def _flushed(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < _LEAST_NORMAL, torch.copysign(values * 0, values), values)


def _sum_from_left(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Float32 (M, N) of (M, K) and (N, K)."""
    part = values.new_zeros(values.shape[0], weight.shape[0])
    for k in range(values.shape[1]):
        part = part + values[:, k, None] * weight[:, k]
    return part


def _tile_sum(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same, `TILE_COLUMNS` at a time."""
    part = values.new_zeros(values.shape[0], weight.shape[0])
    for start in range(0, values.shape[1], TILE_COLUMNS):
        x, w = values[:, start : start + TILE_COLUMNS], weight[:, start : start + TILE_COLUMNS]
        part = part + (
            _sum_from_left(x[:, ::2], w[:, ::2]) + _sum_from_left(x[:, 1::2], w[:, 1::2])
        )
    return part


def _input_scales(x: QuantizedActivation | None) -> tuple[torch.Tensor | None, int]:
    """float32 (M or 1, groups) of the codes, and the columns of a group; 0 for a whole row."""
    if x is None:
        return None, 0
    scale = x.scale.float()
    return scale.reshape(-1, scale.shape[-1]), x.quant_key.granularity.size


def _block_scale(
    weight: QuantizedWeight,
    w_scale: torch.Tensor,
    row_scale: torch.Tensor | None,
    row_group: int,
    start: int,
) -> torch.Tensor | float:
    """What one block sum is multiplied with: (M or 1, N or 1)."""
    scheme, factor = weight.scheme, 1.0
    if row_group:
        assert row_scale is not None
        factor = row_scale[:, start // row_group, None]
    if not scheme.blockwise:
        return factor
    column = w_scale[:, start // scheme.columns]
    return factor * spread_rows(column, scheme.rows, weight.out_features)[None, :]
