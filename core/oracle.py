"""The oracle: one eager function per step, which every kernel must equal bit for bit.

Numerics (docs/numerics.md has the reasons):

* An activation is computed in float32 from the rounded input and rounded once to the model's
  dtype, the boundary at which an observer would see it; only then is it quantised.  A gated
  activation is ``round(round(act(gate)) * up)``, as the eager module does it.
* RMSNorm squares in float32 (exact for BF16 and FP16, but for over- and underflow, which are the
  model's own) and sums in float64, where the order does not show after rounding to float32.
  Every vector width and block size gives the same row.
* Static: ``cast(clamp(x * (1 / scale), -max, max))``; the reciprocal once in float32.
* Dynamic: amax in float32 over the row or group, floored at `AMAX_FLOOR`; an infinity counts as
  the largest finite value of the input's dtype, a NaN as 0.
* NaN gives the code 0x7F whatever its sign and payload; infinities saturate; -0.0 stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .errors import ScaleError
from .quant_key import TENSOR, QuantKey, ScaleFormat, ScaleLayout
from .quantized_activation import QuantizedActivation

FP8_MAX = 448.0
FP4_MAX = 6.0
# 2**-40: far above the subnormals, so that 1 / scale is finite, far below any activation.
AMAX_FLOOR = 2.0**-40
_FP8_NAN = 0x7F
# Midpoints between neighbouring e2m1 magnitudes (0, .5, 1, 1.5, 2, 3, 4, 6).
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


# --- activations -------------------------------------------------------------------------------


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


#: Unary activations by name, each on float32.  Adding one is one line here.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu2": _relu2,
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": F.gelu,
}


@dataclass(frozen=True)
class ActivationSemantics:
    """What an activation site computes.

    Attributes:
        activation: a name of `ACTIVATIONS`.
        gated: multiplied with a second tensor, ``act(gate) * up``.
    """

    activation: str
    gated: bool

    def __str__(self) -> str:
        return f"{self.activation}_mul" if self.gated else self.activation


@dataclass(frozen=True)
class NormSemantics:
    """What a norm site computes.

    Attributes:
        order: "llama" (``weight * round(x / rms)``) or "gemma" (``round(x / rms * (1 + weight))``,
            all in float32).
        eps: added to the mean of squares.
    """

    order: str
    eps: float

    def __str__(self) -> str:
        return f"rms_norm[{self.order}]"


Semantics = ActivationSemantics | NormSemantics


def activate(
    semantics: ActivationSemantics, gate: torch.Tensor, up: torch.Tensor | None = None
) -> torch.Tensor:
    """The raw activation at its rounding boundary.

    Args:
        semantics: which activation.
        gate: (..., K), float16, bfloat16 or float32.
        up: (..., K), same dtype, for a gated activation; else None.

    Returns:
        (..., K) in the dtype of `gate`.
    """
    out = ACTIVATIONS[semantics.activation](gate.float()).to(gate.dtype)
    if not semantics.gated:
        return out
    assert up is not None
    return (out.float() * up.float()).to(gate.dtype)


def rms_norm(semantics: NormSemantics, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm at its rounding boundary.

    Args:
        semantics: rounding order and epsilon.
        x: (..., K), float16, bfloat16 or float32.
        weight: (K,), the dtype of `x`.

    Returns:
        (..., K) in the dtype of `x`.
    """
    return scale_rows(semantics, x, inverse_rms(semantics, x), weight)


def inverse_rms(semantics: NormSemantics, x: torch.Tensor) -> torch.Tensor:
    """``1 / sqrt(mean(x ** 2) + eps)`` of each row of (..., K): float32 (..., 1)."""
    mean = x.float().square().double().sum(-1, keepdim=True).float() / x.shape[-1]
    return 1.0 / torch.sqrt(mean + semantics.eps)


def scale_rows(
    semantics: NormSemantics, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """The second half of a norm: `x` times `inverse` and `weight`, in the order of `semantics`."""
    normed = x.float() * inverse
    if semantics.order == "gemma":
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (weight.float() * normed.to(x.dtype).float()).to(x.dtype)


# --- quantisers --------------------------------------------------------------------------------


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


def _round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))


def quantize_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes of `x` (..., K) with one float32 scale a row: codes, scale (..., 1)."""
    scale = _finite_amax(x) / FP8_MAX
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
        scale = _round_up_to_power_of_two(scale)
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
        NotImplementedError: padded or reordered layouts, which this function does not write.
    """
    if key.layout != ScaleLayout.ROW_MAJOR or key.row_multiple * key.scale_multiple != 1:
        raise NotImplementedError(f"the eager quantiser writes plain row-major scales, not {key}")
    if key.granularity == TENSOR:
        scale = check_static_scale(static_scale, producer)
        codes = quantize_static(x, scale)
    elif key.granularity.kind == "token":
        codes, scale = quantize_token(x)
    elif key.global_scale:
        global_scale = check_static_scale(global_scale, producer)
        codes, scale = quantize_nvfp4(x, global_scale)
    else:
        ue8m0 = key.scale_format == ScaleFormat.UE8M0
        codes, scale = quantize_group(x, key.granularity.size, ue8m0=ue8m0)
        scale = scale.to(key.scale_dtype)
    return QuantizedActivation(
        codes, scale, x.dtype, x.shape, key, x if raw else None, producer, global_scale
    )
