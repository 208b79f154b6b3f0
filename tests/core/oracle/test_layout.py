"""Where codes and scales lie, against index formulas that share no code with the package."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from branchline.core.oracle import quantize
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
    NVFP4,
    QuantKey,
    ScaleLayout,
)
from branchline.core.quantized_activation import QuantizedActivation
from tests.core.oracle.formats import spread

BLOCKWISE = [FP8_DYNAMIC_GROUP128, FP8_DYNAMIC_GROUP128_UE8M0, MXFP8, NVFP4]
SHAPES = [(5, 300), (2, 3, 130), (129, 64), (7,), (1, 1), (2, 0, 40), (3, 65, 513)]


def laid(key: QuantKey, x: torch.Tensor) -> QuantizedActivation:
    return quantize(
        x,
        key,
        static_scale=torch.tensor([0.25]) if key.static else None,
        global_scale=torch.tensor([0.5]) if key.global_scale else None,
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.uint8)


def both(key: QuantKey, shape: tuple[int, ...], **changes: object):
    """Laid out as `changes` say, and row by row: scales (M, groups), codes (M, bytes)."""
    x = spread(*shape) if torch.Size(shape).numel() else torch.empty(shape).bfloat16()
    changed = dataclasses.replace(key, **changes)
    out, plain = laid(changed, x), laid(key, x)
    rows = x.shape[:-1].numel()
    scale = bits(plain.scale)
    scale = scale if key.static else scale.reshape(rows, plain.scale.shape[-1])
    codes = bits(plain.codes).reshape(rows, plain.codes.shape[-1])
    assert out.codes.shape == changed.code_shape(shape)
    assert out.scale.shape == changed.scale_shape(shape)
    assert out.shape == x.shape
    return out, codes, scale


@pytest.mark.parametrize("key", BLOCKWISE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_column_major_scales_lie_column_after_column(key, shape):
    out, codes, scale = both(key, shape, layout=ScaleLayout.COLUMN_MAJOR)
    assert torch.equal(bits(out.codes).reshape(codes.shape), codes)
    assert out.scale.dim() == 2
    # In memory: the first group's scales of all rows, then the second's.
    rows, groups = scale.shape
    in_memory = bits(out.scale).t().flatten().tolist()
    assert in_memory == [int(scale[r, g]) for g in range(groups) for r in range(rows)]
    if rows > 1 and groups > 1:
        assert out.scale.stride() == (1, rows)


def swizzled_place(row: int, group: int, groups: int) -> int:
    """Of a scale, as NVIDIA's text on the 1D block scaling layout describes it."""
    tiles_across = -(-groups // 4)
    tile = (row // 128) * tiles_across + group // 4
    inside = (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4
    return tile * 512 + inside


@pytest.mark.parametrize("key", BLOCKWISE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swizzled_scales_lie_where_the_formula_says(key, shape):
    out, codes, scale = both(key, shape, layout=ScaleLayout.SWIZZLE_128X4)
    assert torch.equal(bits(out.codes).reshape(codes.shape), codes)
    rows, groups = scale.shape
    expected = [0] * out.scale.numel()
    for row in range(rows):
        for group in range(groups):
            expected[swizzled_place(row, group, groups)] = int(scale[row, group])
    assert out.scale.is_contiguous()
    assert bits(out.scale).flatten().tolist() == expected


@pytest.mark.parametrize("key", [*BLOCKWISE, FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padded_rows_are_zero_bytes_in_codes_and_scales(key, shape):
    out, codes, scale = both(key, shape, row_multiple=16)
    rows = codes.shape[0]
    assert out.codes.shape[0] % 16 == 0
    assert torch.equal(bits(out.codes)[:rows], codes)
    assert not bits(out.codes)[rows:].any()
    if key.static:
        return
    assert out.scale.shape[0] == out.codes.shape[0]
    assert torch.equal(bits(out.scale)[:rows], scale)
    assert not bits(out.scale)[rows:].any()


@pytest.mark.parametrize("key", BLOCKWISE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padded_scale_columns_are_zero_bytes_and_keep_the_dimensions(key, shape):
    out, codes, scale = both(key, shape, scale_multiple=4)
    groups = scale.shape[1]
    assert out.scale.shape[:-1] == out.shape[:-1]
    assert torch.equal(bits(out.codes).reshape(codes.shape), codes)
    padded = bits(out.scale).reshape(scale.shape[0], out.scale.shape[-1])
    assert torch.equal(padded[:, :groups], scale)
    assert not padded[:, groups:].any()


@pytest.mark.parametrize("layout", [ScaleLayout.COLUMN_MAJOR, ScaleLayout.SWIZZLE_128X4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout_and_both_paddings_together(layout, shape):
    out, codes, scale = both(MXFP8, shape, layout=layout, row_multiple=3, scale_multiple=3)
    rows, groups = scale.shape
    high, wide = out.scale.shape
    assert high % 3 == wide % 3 == 0 or layout == ScaleLayout.SWIZZLE_128X4
    assert torch.equal(bits(out.codes)[:rows], codes)
    memory = bits(out.scale.t() if layout == ScaleLayout.COLUMN_MAJOR else out.scale).flatten()
    expected = torch.zeros(high * wide, dtype=torch.uint8)
    for row in range(rows):
        for group in range(groups):
            place = group * high + row
            if layout == ScaleLayout.SWIZZLE_128X4:
                place = swizzled_place(row, group, wide)
            expected[place] = scale[row, group]
    assert torch.equal(memory, expected)
