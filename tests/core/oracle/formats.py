"""Number formats from their definitions, sharing no code with the package: fractions, integers."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import torch

INF, NAN = math.inf, math.nan
FLOOR = 2.0**-40
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def e4m3_value(code: int) -> Fraction | float:
    """OCP E4M3: bias 7, no infinities, NaN is S.1111.111."""
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(1, 64)
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3_value(code) for code in range(0x7F)]


def e2m1_value(code: int) -> Fraction:
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = Fraction(mantissa, 2)
    if exponent:
        magnitude = (1 + magnitude) * Fraction(2) ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


E2M1 = [e2m1_value(code) for code in range(8)]


def nearest_even(value: Fraction, grid: list) -> int:
    """Index of the nearest grid value; on a tie the even index; saturating."""
    if value >= grid[-1]:
        return len(grid) - 1
    low, high = 0, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if grid[middle] <= value:
            low = middle
        else:
            high = middle
    below, above = value - grid[low], grid[high] - value
    if below == above:
        return low if low % 2 == 0 else high
    return low if below < above else high


def sign_bit(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0] >> 63


def e4m3_code(value: float) -> int:
    if math.isnan(value):
        return 0x7F
    magnitude = 0x7E if math.isinf(value) else nearest_even(Fraction(abs(value)), E4M3)
    return magnitude | (sign_bit(value) << 7)


def e2m1_code(value: float) -> int:
    if math.isnan(value):
        return 7
    magnitude = 7 if math.isinf(value) else nearest_even(Fraction(abs(value)), E2M1)
    return magnitude | (sign_bit(value) << 3)


def f32(value: float) -> float:
    """Rounded once to float32."""
    with np.errstate(all="ignore"):
        return float(np.float32(value))


def round_bf16(value: float) -> float:
    """Round to nearest even, eight significant bits, by integers."""
    if value == 0 or math.isinf(value) or math.isnan(value):
        return value
    _, exponent = math.frexp(value)
    unit = Fraction(2) ** (max(exponent, -125) - 8)
    return float(round(Fraction(value) / unit) * unit)


def amax(row: list[float], largest: float) -> float:
    finite = [min(abs(v), largest) for v in row if not math.isnan(v)]
    return max([FLOOR, *finite])


def round_up_power_of_two(value: float) -> float:
    power = 2.0 ** math.floor(math.log2(value))
    while power < value:
        power *= 2
    while power / 2 >= value:
        power /= 2
    return power


def scaled(value: float, reciprocal: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(value) * np.float32(reciprocal))


def bytes_of(codes: torch.Tensor) -> list[int]:
    return codes.view(torch.uint8).flatten().tolist()


def rows_of(x: torch.Tensor) -> list[list[float]]:
    return x.double().reshape(-1, x.shape[-1]).tolist()


def spread(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Values over many binades, with every special one sprinkled in."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-12, 9, shape, generator=generator)
    flat = x.view(-1)
    special = (0.0, -0.0, INF, -INF, NAN, 448.0, 464.0, -465.0, 1e-43, -6e-8)
    for position, value in enumerate(special):
        flat[(position * 37 + 5) % flat.numel()] = value
    return x.to(dtype)
