"""The oracle's steps as Triton functions, shared by the kernels.

Every operation is an IEEE one, rounded to nearest: ``div_rn`` and ``sqrt_rn`` where Triton would
otherwise emit approximations, explicit `tl.fma` where a fused product is meant, and kernels are
launched with contraction off (`launch_options`).

Triton's interpreter does not round casts as the hardware does: it cuts float32 to bfloat16 off,
loses carries and ties on the way to float8, and misreads bfloat16 subnormals.  There, and only
there, the same casts are done on the bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton import knobs

_MAX_BLOCK = 2048
_ELEMENTS_PER_WARP = 256  # 8 bfloat16, one 128-bit load, for each of 32 threads
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_FP8_MAX = tl.constexpr(448.0)


def launch_options(columns: int) -> dict[str, Any]:
    """BLOCK, the columns that one program handles at a time, and the options of its launch."""
    block = min(triton.next_power_of_2(columns), _MAX_BLOCK)
    warps = max(1, min(4, block // _ELEMENTS_PER_WARP))
    # Contracting a product and a sum into one rounding would change bytes.
    return {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}


@triton.jit
def load_bf16(pointers, mask):
    """The bfloat16 values at `pointers` as float32; 0 where masked."""
    value = tl.load(pointers, mask=mask, other=0.0)
    if _INTERPRETED:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = value.to(tl.float32)
    return wide


@triton.jit
def round_bf16(x):
    """The nearest bfloat16, as float32."""
    if _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        rounded = x.to(tl.bfloat16).to(tl.float32)
    return rounded


@triton.jit
def _encode_on_bits(x):
    # As encode_e4m3 in native/numerics.h, which explains it.
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = tl.maximum(magnitude & 0x7F800000, (127 - 6) << 23)
    step = (exponent + ((20 << 23) + 56)).to(tl.float32, bitcast=True)
    rounded = (magnitude.to(tl.float32, bitcast=True) + step).to(tl.uint32, bitcast=True)
    code = ((rounded + (exponent >> 20)) & 0x7F) | ((bits >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def store_e4m3(pointers, x, scale, mask):
    """Quantise float32 values with the per-tensor `scale` (a pointer) and store their codes.

    The hardware's conversion rounds to nearest even, subnormals included, and gives 0x7F for NaN.
    The clamp keeps NaN.
    """
    inv_scale = tl.div_rn(1.0, tl.load(scale))
    scaled = x * inv_scale
    scaled = tl.clamp(scaled, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if _INTERPRETED:
        codes = _encode_on_bits(scaled)
    else:
        codes = scaled.to(tl.float8e4nv)
    tl.store(pointers, codes, mask=mask)


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
