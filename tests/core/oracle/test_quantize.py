"""The quantisers against definitions that share no code with them."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from branchline.core import oracle
from branchline.core.errors import ScaleError
from branchline.core.oracle import (
    check_static_scale,
    quantize,
    quantize_group,
    quantize_nvfp4,
    quantize_static,
    quantize_token,
)
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    NVFP4,
)
from tests.core.oracle.formats import (
    DTYPES,
    E2M1,
    E4M3,
    FLOOR,
    INF,
    NAN,
    amax,
    bytes_of,
    e2m1_code,
    e4m3_code,
    e4m3_value,
    f32,
    round_up_power_of_two,
    rows_of,
    scaled,
    sign_bit,
    spread,
)

# --- e4m3 --------------------------------------------------------------------------------------


def test_the_reference_decodes_what_torch_decodes():
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = codes.view(torch.float8_e4m3fn).double().tolist()
    for code, value in enumerate(decoded):
        expected = e4m3_value(code)
        if math.isnan(value):
            assert code & 0x7F == 0x7F
        else:
            assert Fraction(value) == expected
            assert sign_bit(value) == code >> 7
    assert E4M3[-1] == oracle.FP8_MAX == 448


def code_of(value: float, dtype: torch.dtype = torch.float32) -> int:
    return bytes_of(quantize_static(torch.tensor([value], dtype=dtype), torch.ones(1)))[0]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (448.0, 0x7E),
        (449.0, 0x7E),
        (464.0, 0x7E),
        (465.0, 0x7E),
        (480.0, 0x7E),
        (1e30, 0x7E),
        (INF, 0x7E),
        (-448.0, 0xFE),
        (-465.0, 0xFE),
        (-INF, 0xFE),
        (NAN, 0x7F),
        (-NAN, 0x7F),
        (2.0**-9, 0x01),  # smallest subnormal
        (2.0**-10, 0x00),  # tie to zero
        (1.5 * 2.0**-9, 0x02),  # tie to even
        (2.5 * 2.0**-9, 0x02),
        (1.0001 * 2.0**-10, 0x01),
        (-(2.0**-10), 0x80),
        (7.5 * 2.0**-9, 0x08),  # subnormal to normal
        (1e-43, 0x00),
        (-6e-8, 0x80),
        (17.0, 0x58),  # between 16 and 18: tie to even
        (19.0, 0x5A),
        (432.0, 0x7E),  # between 416 and 448
    ],
)
def test_known_codes(value, code):
    assert e4m3_code(value) == code
    assert code_of(value) == code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.0371], ids=str)
def test_static_codes_of_all_encodings(dtype, scale):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    scale = f32(scale)
    reciprocal = f32(1.0 / scale)
    memo: dict[float, int] = {}
    expected = []
    for value in x.double().tolist():
        if value not in memo or value == 0 or math.isnan(value):
            memo[value] = e4m3_code(scaled(value, reciprocal))
        expected.append(memo[value])
    assert bytes_of(quantize_static(x, torch.tensor([scale]))) == expected


def test_every_midpoint_and_its_neighbours():
    values = []
    for low, high in itertools.pairwise(E4M3):
        middle = np.float32(float((low + high) / 2))
        values += [
            float(middle),
            float(np.nextafter(middle, np.float32(0))),
            float(np.nextafter(middle, np.float32(1e9))),
        ]
    values += [-v for v in values]
    codes = bytes_of(quantize_static(torch.tensor(values), torch.ones(1)))
    assert codes == [e4m3_code(v) for v in values]


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000])
def test_every_nan_has_one_code(bits):
    x = torch.from_numpy(np.full(9, bits, dtype=np.uint32).view(np.float32).copy())
    assert bytes_of(quantize_static(x, torch.ones(1))) == [0x7F] * 9
    assert bytes_of(quantize_token(x)[0]) == [0x7F] * 9


def test_static_multiplies_with_the_rounded_reciprocal():
    # 1/3 rounds up in float32: a division would give other codes at a boundary.
    scale = 3.0
    reciprocal = np.float32(1) / np.float32(3)
    x = np.linspace(0.01, 1400, 20001, dtype=np.float32)
    products = (x * reciprocal).astype(np.float64)
    codes = bytes_of(quantize_static(torch.from_numpy(x), torch.tensor([scale])))
    assert codes == [e4m3_code(v) for v in products.tolist()]


# --- dynamic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_token(dtype, ue8m0):
    x = spread(2, 9, 67, dtype=dtype)
    codes, scale = quantize_token(x, ue8m0=ue8m0)
    assert scale.shape == (2, 9, 1)
    largest = float(torch.finfo(dtype).max)
    expected, scales = [], []
    for row in rows_of(x):
        s = f32(f32(amax(row, largest)) / 448)
        s = round_up_power_of_two(s) if ue8m0 else s
        scales.append(s)
        expected += [e4m3_code(scaled(v, f32(1 / s))) for v in row]
    assert scale.flatten().tolist() == scales
    assert bytes_of(codes) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("columns", [1, 127, 128, 129, 300])
def test_groups_and_their_tail(dtype, ue8m0, columns):
    x = spread(5, columns, dtype=dtype, seed=columns)
    codes, scale = quantize_group(x, 128, ue8m0=ue8m0)
    assert scale.shape == (5, -(-columns // 128))
    largest = float(torch.finfo(dtype).max)
    expected, scales = [], []
    for row in rows_of(x):
        for start in range(0, columns, 128):
            block = row[start : start + 128]
            s = f32(f32(amax(block, largest)) / 448)
            s = round_up_power_of_two(s) if ue8m0 else s
            scales.append(s)
            expected += [e4m3_code(scaled(v, f32(1 / s))) for v in block]
    assert scale.flatten().tolist() == scales
    assert bytes_of(codes) == expected
    assert codes.is_contiguous()


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, 1.0), (65 / 64, 2.0), (63 / 64, 1.0), (129 / 128, 2.0)]
)
def test_ue8m0_keeps_exact_powers_and_rounds_all_others_up(factor, expected):
    powers = [2.0**e for e in range(-30, 100)]
    # A row whose largest element is 448 * v has exactly the scale v.
    rows = torch.tensor([[v * factor * 448] for v in powers], dtype=torch.float64)
    assert torch.equal(rows.float().double(), rows)
    scale = quantize_group(rows.float(), 128, ue8m0=True)[1].flatten()
    assert scale.tolist() == [v * expected for v in powers]


def test_ue8m0_never_saturates_a_finite_element():
    x = torch.rand(64, 128) * 1000
    codes, scale = quantize_group(x, 128, ue8m0=True)
    assert bool((x.amax(-1, keepdim=True) / scale <= 448).all())
    assert bool((x.amax(-1, keepdim=True) / scale > 223).all())
    assert bool((torch.log2(scale) % 1 == 0).all())
    assert (codes.float() * scale - x).abs().max() <= 32 * scale.max() / 2


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-43, 6e-8, -6e-8, 2.0**-41, FLOOR])
@pytest.mark.parametrize(
    "key", [FP8_DYNAMIC_TOKEN, FP8_DYNAMIC_GROUP128, FP8_DYNAMIC_GROUP128_UE8M0, MXFP8], ids=str
)
def test_rows_of_nothing_stay_finite(value, key):
    x = torch.full((2, 130), value)
    q = quantize(x, key)
    scale = q.scale.float()
    assert bool(scale.isfinite().all())
    assert bool((scale > 0).all())
    assert bool(scale.reciprocal().isfinite().all())
    codes = q.codes.float()
    assert bool(codes.isfinite().all())
    assert bytes_of(q.codes)[0] >> 7 == sign_bit(value)
    if abs(value) >= FLOOR:
        assert bool(codes.any())
    if value == 0:
        assert not bool(codes.any())


@pytest.mark.parametrize("key", [FP8_DYNAMIC_TOKEN, FP8_DYNAMIC_GROUP128, MXFP8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_do_not_spoil_their_row(key, dtype):
    x = torch.ones(3, 128, dtype=dtype)
    x[0, 3], x[1, 4], x[2, 5] = INF, -INF, NAN
    q = quantize(x, key)
    assert bool(q.scale.float().isfinite().all())
    codes = q.codes.view(torch.uint8)
    assert codes[0, 3] == 0x7E
    assert codes[1, 4] == 0xFE
    assert codes[2, 5] == 0x7F
    alone = quantize(torch.ones(1, 128, dtype=dtype), key).codes.view(torch.uint8)
    keep = torch.arange(128) != 5
    assert torch.equal(codes[2][keep], alone[0][keep])


def test_a_row_of_nan_has_the_scale_of_a_row_of_zeros():
    codes, scale = quantize_token(torch.full((1, 5), NAN))
    assert scale.item() == f32(FLOOR / 448)
    assert bytes_of(codes) == [0x7F] * 5


def test_the_other_rows_do_not_matter():
    x = spread(6, 200)
    for quantiser in (quantize_token, lambda t: quantize_group(t, 128, ue8m0=False)):
        codes, scale = quantiser(x)
        for row in range(6):
            one, its_scale = quantiser(x[row : row + 1])
            assert bytes_of(one) == bytes_of(codes[row])
            assert torch.equal(its_scale[0], scale[row])


@pytest.mark.parametrize("columns", [32, 31, 33, 96, 1])
def test_mxfp8(columns):
    x = spread(4, columns, seed=columns)
    q = quantize(x, MXFP8)
    assert q.scale.dtype == torch.float8_e8m0fnu
    largest = float(torch.finfo(torch.bfloat16).max)
    exponents, expected = [], []
    for row in rows_of(x):
        for start in range(0, columns, 32):
            block = row[start : start + 32]
            s = round_up_power_of_two(f32(f32(amax(block, largest)) / 448))
            exponents.append(int(math.log2(s)) + 127)
            expected += [e4m3_code(scaled(v, 1 / s)) for v in block]
    assert bytes_of(q.scale) == exponents
    assert bytes_of(q.codes) == expected


# --- nvfp4 -------------------------------------------------------------------------------------


def test_e2m1_reference_has_the_eight_magnitudes():
    assert [float(v) for v in E2M1] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nvfp4(x: torch.Tensor, global_scale: float) -> tuple[list[int], list[int]]:
    largest = float(torch.finfo(x.dtype).max)
    packed, scales = [], []
    for row in rows_of(x):
        nibbles = []
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            ideal = f32(f32(f32(amax(block, largest)) / 6) / global_scale)
            code = e4m3_code(min(max(ideal, 2.0**-9), 448.0))
            scales.append(code)
            reciprocal = f32(1 / f32(float(e4m3_value(code)) * global_scale))
            nibbles += [e2m1_code(scaled(v, reciprocal)) for v in block]
        nibbles += [0] * (len(nibbles) % 2)
        packed += [a | (b << 4) for a, b in zip(nibbles[::2], nibbles[1::2], strict=True)]
    return packed, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 40, 128])
@pytest.mark.parametrize("global_scale", [1.0, 0.00371, 64.0], ids=str)
def test_nvfp4(dtype, columns, global_scale):
    x = spread(3, columns, dtype=dtype, seed=columns)
    global_scale = f32(global_scale)
    codes, scale = quantize_nvfp4(x, torch.tensor([global_scale]))
    assert codes.shape == (3, -(-columns // 2))
    assert scale.shape == (3, -(-columns // 16))
    packed, scales = nvfp4(x, global_scale)
    assert bytes_of(scale) == scales
    assert bytes_of(codes) == packed


def test_nvfp4_ties_go_to_the_even_code():
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor([values + [-v for v in values]])
    codes = bytes_of(quantize_nvfp4(x, torch.ones(1))[0])
    nibbles = [n for byte in codes for n in (byte & 15, byte >> 4)]
    assert nibbles == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]


def test_nvfp4_first_column_is_the_low_nibble():
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.0, -0.5
    assert bytes_of(quantize_nvfp4(x, torch.ones(1))[0]) == [0x97] + [0] * 7


@pytest.mark.parametrize(
    ("magnitude", "scale"), [(1e6, 448.0), (INF, 448.0), (1e-9, 2.0**-9), (0.0, 2.0**-9)]
)
def test_nvfp4_block_scales_are_clamped_before_their_cast(magnitude, scale):
    x = torch.full((1, 16), magnitude)
    codes, scales = quantize_nvfp4(x, torch.ones(1))
    assert scales.float().item() == scale
    assert set(bytes_of(codes)) == ({0x77} if magnitude > 1 else {0x00})


# --- the entry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("shape", [(7,), (0, 40), (3, 0), (1, 1), (2, 3, 129)], ids=str)
def test_quantize_serves_every_named_key_and_shape(key, shape):
    x = torch.randn(shape, dtype=torch.float32).to(torch.float16)
    q = quantize(
        x,
        key,
        static_scale=torch.tensor([0.5]) if key.static else None,
        global_scale=torch.tensor([0.5]) if key.global_scale else None,
        raw=True,
    )
    assert q.quant_key is key
    assert q.shape == x.shape
    assert q.dtype == torch.float16
    assert q.raw.values is x
    assert q.raw.rows is None
    assert q.codes.shape == key.code_shape(shape)
    assert q.scale.shape == key.scale_shape(shape)


def test_strided_and_expanded_input_gives_the_same_bytes():
    x = spread(6, 260)
    views = [x[:, ::2], x[::2], x.t(), x[:1].expand(4, 260), x.unflatten(0, (2, 3)).mT]
    for view in views:
        for key in (FP8_DYNAMIC_TOKEN, FP8_DYNAMIC_GROUP128, MXFP8):
            a, b = quantize(view, key), quantize(view.contiguous(), key)
            assert bytes_of(a.codes) == bytes_of(b.codes)
            assert bytes_of(a.scale.contiguous()) == bytes_of(b.scale.contiguous())


BAD_SCALES = [
    None,
    0.0,
    -0.0,
    -1.0,
    INF,
    -INF,
    NAN,
    1e-45,
    1e-39,
    1e39,
    torch.tensor([]),
    torch.ones(2),
    torch.tensor([0.0]),
    torch.tensor(NAN),
    torch.tensor([1e-300], dtype=torch.float64),
]


@pytest.mark.parametrize("scale", BAD_SCALES, ids=str)
def test_bad_scales_are_refused_by_name(scale):
    for attempt in (
        lambda: check_static_scale(scale, "layers.3.down_proj"),
        lambda: quantize(
            torch.ones(1, 16), FP8_STATIC_TENSOR, static_scale=scale, producer="layers.3.down_proj"
        ),
        lambda: quantize(
            torch.ones(1, 16), NVFP4, global_scale=scale, producer="layers.3.down_proj"
        ),
    ):
        with pytest.raises(ScaleError, match=r"layers\.3\.down_proj"):
            attempt()


@pytest.mark.parametrize(
    "scale",
    [0.25, torch.tensor(0.25), torch.tensor([[0.25]], dtype=torch.float64), torch.tensor([0.25])],
    ids=str,
)
def test_good_scales_become_one_float32(scale):
    value = check_static_scale(scale, "x")
    assert value.dtype == torch.float32
    assert value.shape == (1,)
    assert value.item() == 0.25


def test_the_whole_range_of_usable_scales_gives_finite_codes():
    for scale in (1.2e-38, 1e-20, 1e20, 3e38):
        codes = quantize_static(torch.tensor([0.0, 1.0, -1.0, 3e38]), torch.tensor([scale]))
        assert bool(codes.float().isfinite().all())
