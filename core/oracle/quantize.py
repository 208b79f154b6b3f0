"""The quantisers by definition, and where their codes and scales lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import ScaleError
from ..quant_key import QuantKey, ScaleFormat, ScaleLayout
from ..quantized_activation import QuantizedActivation, RawOutput

FP8_MAX = 448.0
FP4_MAX = 6.0
# 2**-40: far above the subnormals, so that 1 / scale is finite, far below any activation.
AMAX_FLOOR = 2.0**-40
_FP8_NAN = 0x7F
# e2m1, and the midpoints between neighbours.
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def check_static_scale(scale: torch.Tensor | float | None, subject: str) -> torch.Tensor:
    """A static scale as float32 of shape (1,).

    Raises:
        ScaleError: absent, more than one element, non-positive or not finite.
    """
    remedy = "calibrate again, or mend the checkpoint"
    if scale is None:
        raise ScaleError(subject, "has no input scale, but its key is static", remedy)
    value = torch.as_tensor(scale, dtype=torch.float32).reshape(-1).detach()
    if value.numel() != 1:
        raise ScaleError(subject, f"input scale has {value.numel()} elements, expected 1", remedy)
    number = value.item()
    if not (0.0 < number < float("inf")):
        raise ScaleError(subject, f"input scale is {number}, expected a positive number", remedy)
    reciprocal = value.reciprocal().item()
    if not (0.0 < reciprocal < float("inf")):
        raise ScaleError(subject, f"input scale {number} has no finite reciprocal", remedy)
    return value


def _cast_fp8(scaled: torch.Tensor) -> torch.Tensor:
    codes = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    # The sign of a NaN differs from one instruction set to the next; its code must not.
    return codes.masked_fill_(scaled.isnan(), _FP8_NAN).view(torch.float8_e4m3fn)


def quantize_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 codes of `x` (..., K) under a per-tensor float32 `scale` (1,): e4m3fn, same shape."""
    return _cast_fp8(x.float() * scale.reciprocal())


def _finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude over the last dimension, (..., 1), floored at `AMAX_FLOOR`.

    A NaN counts as 0, an infinity as the largest finite value of the dtype of `x`.
    """
    limit = torch.finfo(x.dtype).max
    magnitude = torch.nan_to_num(x.float().abs(), nan=0.0, posinf=limit)
    if x.shape[-1] == 0:
        return magnitude.new_zeros((*x.shape[:-1], 1)).clamp_(min=AMAX_FLOOR)
    return magnitude.amax(-1, keepdim=True).clamp_(min=AMAX_FLOOR)


def round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each positive finite number."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))


def quantize_token(x: torch.Tensor, *, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes of `x` (..., K) with one float32 scale a row: codes, scale (..., 1).

    The scale is a power of two, rounded up, if `ue8m0`.
    """
    scale = _finite_amax(x) / FP8_MAX
    if ue8m0:
        scale = round_up_to_power_of_two(scale)
    return _cast_fp8(x.float() * scale.reciprocal()), scale


def _grouped(x: torch.Tensor, size: int) -> torch.Tensor:
    """(..., K) as (..., groups, size), the tail group padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def quantize_group(x: torch.Tensor, size: int, *, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes of `x` (..., K) with one float32 scale a row and `size` columns.

    Returns:
        codes (..., K) and scale (..., ceil(K / size)); powers of two, rounded up, if `ue8m0`.
    """
    blocks = _grouped(x, size)
    scale = _finite_amax(blocks) / FP8_MAX
    if ue8m0:
        scale = round_up_to_power_of_two(scale)
    codes = _cast_fp8(blocks.float() * scale.reciprocal()).view(torch.uint8)
    codes = codes.flatten(-2)[..., : x.shape[-1]].contiguous()
    return codes.view(torch.float8_e4m3fn), scale.squeeze(-1)


def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 codes of `x` (..., K): e2m1 two a byte (low nibble first), e4m3 scale a 16 columns.

    Args:
        x: the activation.
        global_scale: float32 (1,); a value is ``code * block_scale * global_scale``.

    Returns:
        codes (..., ceil(K / 2)) and block scales (..., ceil(K / 16)).  NaN becomes the largest
        magnitude, for e2m1 has none: what the hardware conversion does.
    """
    blocks = _grouped(x, 16)
    ideal = _finite_amax(blocks) / FP4_MAX / global_scale
    block_scale = ideal.clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)
    scaled = blocks.float() * (block_scale.float() * global_scale).reciprocal()
    codes = _cast_fp4(scaled).flatten(-2)[..., : x.shape[-1]]
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.contiguous().view(torch.float4_e2m1fn_x2), block_scale.squeeze(-1)


def _cast_fp4(scaled: torch.Tensor) -> torch.Tensor:
    magnitude = torch.nan_to_num(scaled.abs(), nan=FP4_MAX, posinf=FP4_MAX)
    # Ties go to the even code: the midpoint above an odd code rounds up, above an even one down.
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code, midpoint in enumerate(_FP4_MIDPOINTS):
        above = magnitude >= midpoint if code % 2 else magnitude > midpoint
        codes += above.to(torch.uint8)
    negative = torch.signbit(scaled) & ~scaled.isnan()
    return codes | (negative.to(torch.uint8) << 3)


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """float32 (..., 2 * bytes): the values of e2m1 codes, the low nibble of a byte first."""
    magnitudes = torch.tensor(_FP4_MAGNITUDES, device=packed.device)
    table = torch.cat((magnitudes, -magnitudes))
    data = packed.view(torch.uint8).int()
    return torch.stack((table[data & 15], table[data >> 4]), -1).flatten(-2)


def quantize(
    x: torch.Tensor,
    key: QuantKey,
    *,
    static_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    raw: bool = False,
    producer: str = "the eager quantiser",
) -> QuantizedActivation:
    """Quantise a raw activation as `key` says: the definition for every producer.

    Args:
        x: (..., K), float16, bfloat16 or float32.
        key: what the consumer declares.
        static_scale: float32 (1,), for a static key.
        global_scale: float32 (1,), for a key that has one.
        raw: keep `x` beside the codes.
        producer: name of the caller, for messages.

    Raises:
        ScaleError: a scale the key needs is missing or unusable.
    """
    ue8m0 = key.scale_format == ScaleFormat.UE8M0
    kind = key.epilogue
    if kind == "static":
        scale = check_static_scale(static_scale, producer)
        codes = quantize_static(x, scale)
    elif kind == "token":
        codes, scale = quantize_token(x, ue8m0=ue8m0)
    elif kind == "nvfp4":
        global_scale = check_static_scale(global_scale, producer)
        codes, scale = quantize_nvfp4(x, global_scale)
    else:
        codes, scale = quantize_group(x, key.granularity.size, ue8m0=ue8m0)
    codes, scale = arrange(codes, scale.to(key.scale_dtype), key)
    return QuantizedActivation(
        codes,
        scale,
        x.dtype,
        x.shape,
        key,
        RawOutput(x) if raw else None,
        producer,
        global_scale,
    )


# --- layouts -------------------------------------------------------------------------------------


def arrange(
    codes: torch.Tensor, scale: torch.Tensor, key: QuantKey
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., K) and row-major scales (..., groups) as `key` lays them out.

    Padding is zero bytes, in codes and scales alike.
    """
    shape = (*codes.shape[:-1], codes.shape[-1] * key.codes_per_byte)
    rows, groups = codes.shape[:-1].numel(), scale.shape[-1]
    if key.row_multiple > 1:
        codes = _padded(codes.reshape(rows, codes.shape[-1]), key.code_shape(shape))
    if key.epilogue == "static" or not key.arranged:
        return codes, scale
    if key.layout == ScaleLayout.SWIZZLE_128X4:
        return codes, _swizzled(scale.reshape(rows, groups), key)
    if not key.flat:
        return codes, _padded(scale, (*scale.shape[:-1], key.padded_groups(groups)))
    wanted = (key.padded_rows(rows), key.padded_groups(groups))
    scale = _padded(scale.reshape(rows, groups), wanted)
    if key.layout == ScaleLayout.COLUMN_MAJOR:
        scale = scale.view(_BITS[scale.element_size()]).t().contiguous().t().view(scale.dtype)
    return codes, scale


_BITS = {1: torch.uint8, 4: torch.int32}


def _padded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    out = torch.zeros(shape, dtype=_BITS[x.element_size()], device=x.device)
    out[tuple(slice(size) for size in x.shape)] = x.view(out.dtype)
    return out.view(x.dtype)


def _swizzled(scale: torch.Tensor, key: QuantKey) -> torch.Tensor:
    """(rows, groups) in tiles of 128 rows and 4 groups, 512 neighbours each.

    In a tile, the scale of row r and group g is the element ``(r % 32) * 16 + (r // 32) * 4 + g``:
    what block-scaled matrix instructions read (NVIDIA cuBLAS, "1D block scaling factors layout").
    """
    rows, groups = scale.shape
    high, wide = key.padded_rows(rows), key.padded_groups(groups)
    tiles = _padded(scale, (high, wide)).view(_BITS[scale.element_size()])
    tiles = tiles.view(high // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high, wide).view(scale.dtype)
