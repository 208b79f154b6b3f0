"""Weights on a quantised grid: codes, scales, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core import native
from ..core.errors import ScaleError
from ..core.oracle import (
    AMAX_FLOOR,
    FP4_MAX,
    FP8_MAX,
    fp4_values,
    quantize_group,
    quantize_nvfp4,
    quantize_static,
    quantize_token,
    round_up_to_power_of_two,
)
from ..core.quant_key import ScaleFormat
from ..core.scheme import PER_CHANNEL, WeightScheme
from . import native as native_calls

_MEND = "mend the checkpoint, or quantise the layer again"
_FP8_NAN = 0x7F


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight (N, K) as codes.

    Attributes:
        codes: float8_e4m3fn (N, K), or float4_e2m1fn_x2 (N, ceil(K / 2)).
        scale: (rows, columns) of `scheme.scale_shape`; multiplies the codes.  float32, or the
            one-byte dtype of the format (e8m0, e4m3).
        scheme: which elements share a scale.
        in_features: K.
        global_scale: float32 (1,), which multiplies the block scales; None where the scheme has
            none.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    scheme: WeightScheme
    in_features: int
    global_scale: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = (self.codes, self.scale, self.global_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def check(self, subject: str) -> QuantizedWeight:
        """This weight, if shapes fit and every code and scale is usable.

        Args:
            subject: the layer, for messages.

        Raises:
            ScaleError: a scale that is zero, negative (what some engines start with), not finite
                or of another shape; or codes that are NaN.
        """
        self.check_shapes(subject)
        # A block of zeros is one under any scale: NVFP4's smallest may round to 0.
        self._check_values(subject, "weight scale", self.scale, zero=self.scheme.global_scale)
        if self.scheme.global_scale:
            if self.global_scale is None:
                raise ScaleError(subject, "its weight has no global scale", _MEND)
            self._check_values(subject, "weight's global scale", self.global_scale, zero=False)
        if self.codes.dtype == torch.float8_e4m3fn and holds_nan(self.codes):
            raise ScaleError(subject, "its weight holds NaN codes", _MEND)
        return self

    def check_shapes(self, subject: str) -> None:
        """Refuse codes or scales of other shapes than the scheme's.

        Raises:
            ScaleError: one of them.
        """
        packed = 2 if self.codes.dtype == torch.float4_e2m1fn_x2 else 1
        for what, found, wanted in (
            ("codes have", self.codes.shape[1:], (-(-self.in_features // packed),)),
            (
                "scale has",
                self.scale.shape,
                self.scheme.scale_shape(self.out_features, self.in_features),
            ),
        ):
            if tuple(found) != wanted:
                reason = f"its weight {what} shape {tuple(found)}, expected {wanted}"
                raise ScaleError(subject, reason, _MEND)

    def _check_values(self, subject: str, name: str, scale: torch.Tensor, zero: bool) -> None:
        scale = scale.float()
        usable = scale.isfinite() & (scale >= 0 if zero else scale > 0)
        if not bool(usable.all()):
            bad = scale[~usable].flatten()[0].item()
            reason = f"its {name} holds {bad}, expected positive finite numbers"
            raise ScaleError(subject, reason, _MEND)

    @classmethod
    def from_float(
        cls, weight: torch.Tensor, subject: str, scheme: WeightScheme = PER_CHANNEL
    ) -> QuantizedWeight:
        """Quantise a weight (N, K).

        Args:
            weight: float16, bfloat16 or float32.
            subject: the layer, for messages.
            scheme: which elements share a scale.

        Raises:
            ScaleError: the weight holds NaN or infinities.
        """
        if not bool(weight.isfinite().all()):
            raise ScaleError(subject, "its weight holds NaN or inf", "mend the checkpoint")
        weight = weight.contiguous()
        given = _global_scale(weight) if scheme.global_scale else None
        codes, scale = _quantize(weight, scheme, given)
        return cls(codes, scale, scheme, weight.shape[1], given)

    @classmethod
    def unfilled(
        cls,
        scheme: WeightScheme,
        out_features: int,
        in_features: int,
        scale_dtype: torch.dtype | None = None,
    ) -> QuantizedWeight:
        """A weight (N, K) on the meta device: shapes, dtypes and sizes, and no values.

        Args:
            scheme: which elements share a scale.
            out_features: N.
            in_features: K.
            scale_dtype: of the scales; None for what `from_float` makes.
        """
        packed = 2 if scheme.code_dtype == torch.float4_e2m1fn_x2 else 1
        if scale_dtype is None:
            scale_dtype = torch.float32
            if scheme.global_scale:
                scale_dtype = torch.float8_e4m3fn
            elif scheme.scale_format == ScaleFormat.UE8M0 and scheme.rows == 1 and scheme.blockwise:
                scale_dtype = torch.float8_e8m0fnu
        shape = scheme.scale_shape(out_features, in_features)
        return cls(
            torch.empty(
                out_features, -(-in_features // packed), dtype=scheme.code_dtype, device="meta"
            ),
            torch.empty(shape, dtype=scale_dtype, device="meta"),
            scheme,
            in_features,
            torch.empty(1, device="meta") if scheme.global_scale else None,
        )

    def scales(self) -> torch.Tensor:
        """float32 scales of `scheme.scale_shape`, the global one multiplied in."""
        scale = self.scale.float()
        return scale if self.global_scale is None else scale * self.global_scale

    def values(self) -> torch.Tensor:
        """float32 (N, K): the codes' values, no scale applied."""
        return code_values(self.codes)[:, : self.in_features]

    def dequantize(self) -> torch.Tensor:
        """float32 (N, K)."""
        return self.values() * self.spread(self.scales())

    def spread(self, scale: torch.Tensor) -> torch.Tensor:
        """Scales of `scheme.scale_shape`, so that they broadcast with (N, K)."""
        return _spread(scale, self.scheme, self.out_features, self.in_features)


def _spread(
    scale: torch.Tensor, scheme: WeightScheme, out_features: int, in_features: int
) -> torch.Tensor:
    scale = spread_rows(scale, scheme.rows, out_features)
    if scheme.columns > 1:
        scale = scale.repeat_interleave(scheme.columns, 1)[:, :in_features]
    return scale


def spread_rows(scale: torch.Tensor, rows: int, out_features: int) -> torch.Tensor:
    """Scales of blocks of `rows` output channels, one for each of `out_features`."""
    return scale.repeat_interleave(rows, 0)[:out_features] if rows > 1 else scale


def code_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of codes (rows, bytes), no scale applied; of e2m1 twice as many columns."""
    if codes.dtype != torch.float8_e4m3fn:
        return fp4_values(codes)
    if not native.load().available or codes.device.type != "cpu" or codes.stride(-1) != 1:
        return codes.float()
    return native_calls.decode_fp8(codes)


def holds_nan(codes: torch.Tensor) -> bool:
    """Whether some e4m3fn code is NaN."""
    return bool((codes.view(torch.uint8) & _FP8_NAN == _FP8_NAN).any())


def _global_scale(weight: torch.Tensor) -> torch.Tensor:
    """float32 (1,): the largest block scale becomes the largest e4m3 number."""
    amax = weight.abs().amax().float() if weight.numel() else torch.zeros(())
    return storable_global_scale((amax.clamp(min=AMAX_FLOOR) / (FP4_MAX * FP8_MAX)).reshape(1))


def storable_global_scale(scale: torch.Tensor) -> torch.Tensor:
    """The float32 number next to `scale` that is its reciprocal's reciprocal.

    Checkpoints store the reciprocal; read again, another number would be one rounding off.
    """
    return scale.reciprocal().reciprocal()


def _quantize(
    weight: torch.Tensor, scheme: WeightScheme, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    ue8m0 = scheme.scale_format == ScaleFormat.UE8M0
    if given is not None:
        return quantize_nvfp4(weight, given)
    if scheme.per_channel:
        return quantize_token(weight, ue8m0=ue8m0)
    if scheme.rows == 1:
        codes, scale = quantize_group(weight, scheme.columns, ue8m0=ue8m0)
        return codes, scale.to(torch.float8_e8m0fnu) if ue8m0 else scale
    return _quantize_blocks(weight, scheme, ue8m0)


def _quantize_blocks(
    weight: torch.Tensor, scheme: WeightScheme, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out_features, in_features = weight.shape
    rows, columns = scheme.rows or max(out_features, 1), scheme.columns or max(in_features, 1)
    padded = F.pad(weight, (0, -in_features % columns, 0, -out_features % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.float().abs().amax((1, 3)).clamp_(min=AMAX_FLOOR) / FP8_MAX
    if ue8m0:
        scale = round_up_to_power_of_two(scale)
    spread = _spread(scale, scheme, out_features, in_features)
    # The definition's own cast: a product with a reciprocal, clamped.
    codes = quantize_static(weight.float() * spread.reciprocal(), weight.new_ones(1).float())
    return codes, scale
