from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchline.core import quant_key
from branchline.core.errors import ConfigError
from branchline.core.quant_key import (
    TENSOR,
    TOKEN,
    Granularity,
    QuantKey,
    ScaleFormat,
    ScaleLayout,
    parse_key,
)

FP8 = torch.float8_e4m3fn
FP4 = torch.float4_e2m1fn_x2

NAMED = {
    "FP8_STATIC_TENSOR": "fp8-static-tensor",
    "FP8_DYNAMIC_TOKEN": "fp8-dynamic-token",
    "FP8_DYNAMIC_TOKEN_UE8M0": "fp8-dynamic-token-ue8m0",
    "FP8_DYNAMIC_GROUP128": "fp8-dynamic-group128",
    "FP8_DYNAMIC_GROUP128_UE8M0": "fp8-dynamic-group128-ue8m0",
    "MXFP8": "fp8-dynamic-group32-ue8m0",
    "NVFP4": "fp4-dynamic-group16-e4m3",
}


def group_key(size: int = 128, **changes: object) -> QuantKey:
    fields: dict = {
        "code_dtype": FP8,
        "scale_dtype": torch.float32,
        "scale_format": ScaleFormat.FLOAT32,
        "granularity": Granularity("group", size),
        "static": False,
    }
    return QuantKey(**{**fields, **changes})


def token_key(**changes: object) -> QuantKey:
    return group_key(**{"granularity": TOKEN, **changes})


# --- named keys --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), NAMED.items())
def test_named_key_prints_what_it_is(name, text):
    assert str(getattr(quant_key, name)).startswith(text)


def test_named_keys_are_told_apart_by_equality_hash_and_text():
    keys = [getattr(quant_key, name) for name in NAMED]
    assert len(set(keys)) == len({str(key) for key in keys}) == len(keys)
    for key in keys:
        twin = dataclasses.replace(key)
        assert twin is not key
        assert twin == key
        assert hash(twin) == hash(key)


@pytest.mark.parametrize("name", ["MXFP8", "FP8_DYNAMIC_GROUP128_UE8M0"])
def test_powers_of_two_are_named_ue8m0_whatever_carries_them(name):
    key = getattr(quant_key, name)
    carried = {"MXFP8": torch.float8_e8m0fnu, "FP8_DYNAMIC_GROUP128_UE8M0": torch.float32}
    assert key.scale_format is ScaleFormat.UE8M0
    assert key.scale_dtype == carried[name]


@pytest.mark.parametrize(
    "change",
    [
        {"scale_dtype": torch.float8_e8m0fnu, "scale_format": ScaleFormat.UE8M0},
        {"scale_format": ScaleFormat.UE8M0},
        {"granularity": Granularity("group", 64)},
        {"layout": ScaleLayout.COLUMN_MAJOR},
        {"layout": ScaleLayout.SWIZZLE_128X4},
        {"row_multiple": 4},
        {"scale_multiple": 4},
    ],
    ids=str,
)
def test_every_field_counts_in_equality(change):
    base, other = group_key(), group_key(**change)
    assert base != other
    assert str(base) != str(other)


def test_keys_that_differ_only_in_what_carries_the_scale_print_apart():
    # A mismatch is reported by printing both keys: they may not look the same.
    carried = [
        group_key(scale_format=ScaleFormat.UE8M0, scale_dtype=dtype)
        for dtype in (torch.float32, torch.float8_e8m0fnu)
    ]
    assert carried[0] != carried[1]
    assert str(carried[0]) != str(carried[1])


def test_keys_that_differ_only_in_the_global_scale_print_apart():
    with_global = quant_key.NVFP4
    try:
        without = dataclasses.replace(with_global, global_scale=False)
    except ConfigError:
        return  # refused: nothing to mix up
    assert str(with_global) != str(without)


def test_layout_and_padding_are_part_of_the_text():
    key = group_key(row_multiple=128, scale_multiple=4, layout=ScaleLayout.SWIZZLE_128X4)
    assert str(key) == "fp8-dynamic-group128-swizzle-128x4-rows%128-scales%4"


def test_key_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        quant_key.NVFP4.static = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        TENSOR.size = 3


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"code_dtype": torch.float8_e4m3fnuz}, "float8_e4m3fnuz"),
        ({"code_dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"code_dtype": torch.int8}, "int8"),
        ({"code_dtype": torch.bfloat16}, "bfloat16"),
        ({"symmetric": False}, "asymmetric"),
        ({"static": True}, "group128"),
        ({"static": True, "granularity": TOKEN}, "token"),
        ({"row_multiple": 0}, "multiples"),
        ({"scale_multiple": 0}, "multiples"),
        ({"row_multiple": -1}, "multiples"),
        ({"granularity": TOKEN, "layout": ScaleLayout.COLUMN_MAJOR}, "token"),
        ({"granularity": TENSOR, "layout": ScaleLayout.SWIZZLE_128X4}, "tensor"),
        ({"granularity": TOKEN, "scale_multiple": 4}, "token"),
        ({"granularity": TENSOR, "scale_multiple": 2}, "tensor"),
    ],
    ids=str,
)
def test_key_that_no_linear_consumes_is_refused(change, word):
    with pytest.raises(ConfigError, match=word) as caught:
        group_key(**change)
    assert "branchline.linear" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"scale_dtype": torch.int64},
        {"scale_dtype": torch.float8_e8m0fnu},  # cannot carry any float32
        {"scale_dtype": torch.float8_e4m3fn, "scale_format": ScaleFormat.UE8M0},
    ],
    ids=str,
)
def test_scale_dtype_that_cannot_carry_the_format_is_refused(change):
    with pytest.raises(ConfigError):
        group_key(**change)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("channel", 0),
        ("", 0),
        ("tensor", 128),
        ("token", 1),
        ("group", 0),
        ("group", -1),
        ("Group", 128),
        ("tensor", -5),
        ("token", -1),
    ],
)
def test_granularity_refusals(kind, size):
    with pytest.raises(ConfigError, match="granularity"):
        Granularity(kind, size)


def test_granularity_text():
    assert [str(g) for g in (TENSOR, TOKEN, Granularity("group", 32))] == [
        "tensor",
        "token",
        "group32",
    ]


# --- shapes ------------------------------------------------------------------------------------

SHAPES = [(5,), (0, 7), (3, 1), (2, 3, 130), (4, 128), (1, 257), (3, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_codes_have_the_shape_of_the_activation(shape):
    assert token_key().code_shape(shape) == shape


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_codes_are_two_a_byte_and_odd_rows_end_in_half_a_byte(shape):
    key = quant_key.NVFP4
    assert key.codes_per_byte == 2
    assert key.code_shape(shape) == (*shape[:-1], -(-shape[-1] // 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [16, 32, 128])
def test_a_tail_group_has_its_own_scale(shape, size):
    assert group_key(size).scale_shape(shape) == (*shape[:-1], -(-shape[-1] // size))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensor_and_token_scales(shape):
    assert quant_key.FP8_STATIC_TENSOR.scale_shape(shape) == (1,)
    assert token_key().scale_shape(shape) == (*shape[:-1], 1)


@pytest.mark.parametrize(
    ("shape", "multiple", "expected"),
    [
        ((5, 130), 4, (8, 130)),
        ((2, 3, 130), 4, (8, 130)),
        ((8, 130), 4, (8, 130)),
        ((0, 130), 4, (0, 130)),
        ((130,), 16, (16, 130)),
    ],
)
def test_padded_rows_are_two_dimensional(shape, multiple, expected):
    assert group_key(row_multiple=multiple).code_shape(shape) == expected


def test_padded_packed_codes():
    key = dataclasses.replace(quant_key.NVFP4, row_multiple=128)
    assert key.code_shape((3, 43, 17)) == (256, 9)


@pytest.mark.parametrize(
    ("columns", "multiple", "expected"), [(128, 4, 4), (513, 4, 8), (512, 4, 4), (0, 4, 0)]
)
def test_padded_scale_columns(columns, multiple, expected):
    assert group_key(scale_multiple=multiple).scale_shape((2, columns)) == (2, expected)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 16), (128, 4)),
        ((128, 64), (128, 4)),
        ((129, 65), (256, 8)),
        ((2, 65, 1000), (256, 64)),
        ((0, 64), (0, 4)),
    ],
)
def test_swizzled_scales_fill_whole_tiles(shape, expected):
    key = group_key(16, layout=ScaleLayout.SWIZZLE_128X4)
    assert key.scale_shape(shape) == expected
    assert math.prod(expected) % 512 == 0


@pytest.mark.parametrize(
    ("shape", "expected"), [((3, 300), (3, 3)), ((2, 3, 300), (6, 3)), ((300,), (1, 3))]
)
def test_column_major_scales_are_two_dimensional(shape, expected):
    assert group_key(layout=ScaleLayout.COLUMN_MAJOR).scale_shape(shape) == expected


@pytest.mark.parametrize(
    ("shape", "expected"), [((2, 3, 130), (8, 1)), ((130,), (4, 1)), ((0, 7), (0, 1))]
)
def test_scales_of_padded_rows_are_padded_like_the_codes(shape, expected):
    key = token_key(row_multiple=4)
    assert key.scale_shape(shape) == expected
    assert key.code_shape(shape)[0] == expected[0]


def test_padded_groups_alone_keep_the_leading_dimensions():
    assert group_key(scale_multiple=4).scale_shape((2, 3, 513)) == (2, 3, 8)


@pytest.mark.parametrize(
    ("name", "epilogue"),
    [
        ("FP8_STATIC_TENSOR", "static"),
        ("FP8_DYNAMIC_TOKEN", "token"),
        ("FP8_DYNAMIC_TOKEN_UE8M0", "token"),
        ("FP8_DYNAMIC_GROUP128_UE8M0", "group"),
        ("MXFP8", "group"),
        ("NVFP4", "nvfp4"),
    ],
)
def test_epilogue(name, epilogue):
    assert getattr(quant_key, name).epilogue == epilogue


@pytest.mark.parametrize("key", quant_key.KEYS, ids=str)
def test_named_keys_are_plain_and_what_is_laid_out_is_not(key):
    assert key.plain() == key
    assert not key.arranged
    assert not key.flat
    padded = dataclasses.replace(key, row_multiple=4)
    assert padded.arranged
    assert padded.flat
    assert padded.plain() == key


# --- text and back -----------------------------------------------------------------------------


@st.composite
def keys(draw) -> QuantKey:
    plain = draw(st.sampled_from(quant_key.KEYS))
    changes: dict = {"row_multiple": draw(st.integers(1, 4096))}
    if plain.granularity.kind == "group":
        changes["layout"] = draw(st.sampled_from(ScaleLayout))
        changes["scale_multiple"] = draw(st.integers(1, 4096))
        if not plain.global_scale:
            changes["granularity"] = Granularity("group", draw(st.integers(1, 10**8)))
    if plain.scale_format == ScaleFormat.UE8M0:
        changes["scale_dtype"] = draw(st.sampled_from([torch.float32, torch.float8_e8m0fnu]))
    return dataclasses.replace(plain, **changes)


@given(keys())
def test_a_key_is_read_from_its_own_text(key):
    assert parse_key(str(key)) == key


@given(st.text(alphabet="fp48-statictensordynamicgroupue0m%1", max_size=60) | st.text(max_size=20))
def test_what_is_read_prints_as_it_was(text):
    try:
        key = parse_key(text)
    except ConfigError:
        return
    assert str(key) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fp8",
        "fp8-static-tensor ",
        "FP8-static-tensor",
        "fp8-static-tensor-rows%1",
        "fp8-dynamic-group0128",
        "fp8-dynamic-group" + "1" * 5000,
        "fp8-dynamic-group128-float32",
        "fp8-dynamic-group128-row-major",
        "fp8-dynamic-group128-scales%4-rows%4",
    ],
)
def test_another_text_is_refused_with_what_is_known(text):
    with pytest.raises(ConfigError) as caught:
        parse_key(text)
    assert all(str(key) in caught.value.remedy for key in quant_key.KEYS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fp8-dynamic-tensor", "neighbours"),
        ("fp8-static-token", "per tensor"),
        ("fp8-dynamic-token3", "only a group has a size"),
        ("fp8-dynamic-group", "only a group has a size"),
        ("fp4-dynamic-group32-e4m3-global", "NVFP4"),
        ("fp8-dynamic-token-column-major", "block scales"),
    ],
)
def test_a_text_of_no_possible_key_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_key(text)
