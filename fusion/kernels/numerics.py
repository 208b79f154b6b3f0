"""The oracle's steps as Triton functions, shared by the kernels.

Every operation is an IEEE one, rounded to nearest: ``div_rn`` and ``sqrt_rn`` where Triton would
otherwise emit approximations, explicit `tl.fma` where a fused product is meant, and kernels are
launched with contraction off (`plan.OPTIONS`).

Triton's interpreter does not round casts as the hardware does: it cuts float32 to bfloat16 off,
loses carries and ties on the way to float8, and misreads bfloat16 subnormals; inline assembly it
does not run at all.  There, and only there, the same casts are done on the bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton import knobs

from ...core.oracle import AMAX_FLOOR, FP4_MAX, FP8_MAX

if TYPE_CHECKING:
    # Within a kernel a constant is what was passed, not the box that it came in.
    constexpr = Any
else:
    constexpr = tl.constexpr

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP4_MAX = tl.constexpr(FP4_MAX)
_AMAX_FLOOR = tl.constexpr(AMAX_FLOOR)
_BF16_MAX = tl.constexpr(3.3895313892515355e38)
#: Two float32 become a byte: four bytes at a time, for registers have 32 bits.
_E2M1X2: Any = tl.constexpr("""{
.reg .b8 a, b, c, d;
cvt.rn.satfinite.e2m1x2.f32 a, $5, $1;
cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
cvt.rn.satfinite.e2m1x2.f32 c, $7, $3;
cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
mov.b32 $0, {a, b, c, d};
}""")


# --- bfloat16 ------------------------------------------------------------------------------------


@triton.jit
def load_encodings(pointers, mask):
    """The bfloat16 values at `pointers` as unsigned integers; 0 where masked."""
    value = tl.load(pointers, mask=mask, other=0.0)
    return value.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def load_bf16(pointers, mask):
    """The bfloat16 values at `pointers` as float32; 0 where masked."""
    if INTERPRETED:
        wide = (load_encodings(pointers, mask) << 16).to(tl.float32, bitcast=True)
    else:
        wide = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return wide


@triton.jit
def round_bf16(x):
    """The nearest bfloat16, as float32."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = tl.where(x == x, bits, 0x7FC00000).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        rounded = x.to(tl.bfloat16).to(tl.float32)
    return rounded


@triton.jit
def narrow_bf16(x):
    """What `round_bf16` returned, as bfloat16."""
    if INTERPRETED:
        narrow = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(tl.bfloat16)
    return narrow


# --- codes ---------------------------------------------------------------------------------------


@triton.jit
def _e4m3_on_bits(x):
    # As encode_e4m3 in native/numerics.h, which explains it.
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = tl.maximum(magnitude & 0x7F800000, (127 - 6) << 23)
    step = (exponent + ((20 << 23) + 56)).to(tl.float32, bitcast=True)
    rounded = (magnitude.to(tl.float32, bitcast=True) + step).to(tl.uint32, bitcast=True)
    code = ((rounded + (exponent >> 20)) & 0x7F) | ((bits >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def encode_e4m3(x):
    """The nearest float8_e4m3fn codes of float32 values, as bytes; saturating.

    The hardware's conversion rounds to nearest even, subnormals included, and gives 0x7F for NaN,
    which the clamp keeps.
    """
    x = tl.clamp(x, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        codes = _e4m3_on_bits(x)
    else:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def _e2m1_on_bits(x):
    # As the oracle's _cast_fp4: ties go to the even code.
    magnitude = tl.where(x == x, tl.abs(x), _FP4_MAX)
    code = (magnitude > 0.25).to(tl.uint32) + (magnitude >= 0.75).to(tl.uint32)
    code += (magnitude > 1.25).to(tl.uint32) + (magnitude >= 1.75).to(tl.uint32)
    code += (magnitude > 2.5).to(tl.uint32) + (magnitude >= 3.5).to(tl.uint32)
    code += (magnitude > 5.0).to(tl.uint32)
    sign = tl.where(x == x, x.to(tl.uint32, bitcast=True) >> 31, 0)
    return code | (sign << 3)


@triton.jit
def encode_e2m1_pairs(low, high):
    """The nearest e2m1 codes of float32 values, two in each byte; saturating, NaN is +6."""
    if INTERPRETED:
        codes = (_e2m1_on_bits(low) | (_e2m1_on_bits(high) << 4)).to(tl.uint8)
    else:
        codes = tl.inline_asm_elementwise(
            _E2M1X2, "=r,r,r,r,r,r,r,r,r", [low, high], dtype=tl.uint8, is_pure=True, pack=4
        )
    return codes


# --- scales --------------------------------------------------------------------------------------


@triton.jit
def amax(x, AXIS: constexpr):
    """The largest magnitude: a NaN counts as 0, an infinity as the largest bfloat16; floored."""
    magnitude = tl.where(x == x, tl.minimum(tl.abs(x), _BF16_MAX), 0.0)
    return tl.maximum(tl.max(magnitude, axis=AXIS), _AMAX_FLOOR)


@triton.jit
def fp8_scale(largest, UE8M0: constexpr):
    """The scale of values up to `largest`, a power of two, rounded up, if UE8M0."""
    scale = tl.div_rn(largest, _FP8_MAX)
    if UE8M0:
        # Carries into the exponent unless the mantissa is 0; no scale is subnormal.
        bits = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def nvfp4_scale(largest, global_scale):
    """The block scale of values up to `largest`: an e4m3 value, as float32."""
    ideal = tl.div_rn(tl.div_rn(largest, _FP4_MAX), global_scale)
    ideal = tl.minimum(tl.maximum(ideal, 0.001953125), _FP8_MAX)
    # Codes there are as far apart as the last place of `step`: adding it rounds, exactly.
    exponent = tl.maximum(ideal.to(tl.uint32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
    step = (exponent + (20 << 23)).to(tl.float32, bitcast=True)
    return (ideal + step) - step


@triton.jit
def reciprocal(x):
    """``1 / x``, rounded once."""
    return tl.div_rn(1.0, x)


# --- activations ---------------------------------------------------------------------------------


@triton.jit
def relu(x):
    """``max(x, 0)``, where a NaN stays one."""
    if INTERPRETED:
        # torch keeps -0.0 on the CPU; its CUDA kernel is the instruction below, which does not.
        positive = tl.where(x < 0.0, 0.0, x)
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return positive


@triton.jit
def silu(x):
    """``x / (1 + exp(-x))`` in float32, the exponential exact to one unit in the last place.

    Not `tl.exp`: that is ``ex2.approx(x * log2(e))``, whose argument is rounded before the
    exponential magnifies it (relative error 2**-17 at x = -80, enough to move a bfloat16).  Not
    libdevice: its exponential rests on ``ex2.approx`` too, flushes subnormals as Triton links it,
    and cannot be checked without a GPU.  These are the operations of native/numerics.h in the same
    order, so what is proved there on all encodings holds here.
    """
    clamped = tl.clamp(x, -89.0, 80.0, propagate_nan=tl.PropagateNan.ALL)
    to_integer = 12582912.0 + 126.0  # 1.5 * 2**23: leaves n and a bias in the low bits
    shifted = tl.fma(clamped, -1.44269502162933349609375, to_integer)
    n = shifted - to_integer
    r = tl.fma(n, 0.693359375, clamped)
    r = tl.fma(n, -2.12194441701285541057586669921875e-4, r)
    p = tl.fma(r, -1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, -8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, -1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r, -1.0)
    p = tl.fma(p, r, 1.0)
    half_power = (shifted.to(tl.uint32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return tl.div_rn(x, tl.fma(p * half_power, 2.0, 1.0))
