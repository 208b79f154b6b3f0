"""`QuantKey`: what a linear accepts, as a value that can be compared, hashed and printed."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from .errors import ConfigError


class ScaleFormat(StrEnum):
    """How the values of a scale are restricted, whatever dtype carries them."""

    FLOAT32 = "float32"
    UE8M0 = "ue8m0"
    E4M3 = "e4m3"


class ScaleLayout(StrEnum):
    """Where a block scale lies in memory."""

    ROW_MAJOR = "row-major"
    COLUMN_MAJOR = "column-major"
    SWIZZLE_128X4 = "swizzle-128x4"


@dataclass(frozen=True)
class Granularity:
    """How many elements share one scale.

    Args:
        kind: "tensor", "token" (one scale a row) or "group" (one a row and `size` columns).
        size: columns of a group; 0 for the other two kinds.

    Raises:
        ConfigError: an unknown kind, or a size that does not go with it.
    """

    kind: str
    size: int = 0

    def __post_init__(self) -> None:
        sized = self.size >= 1 if self.kind == "group" else self.size == 0
        if self.kind not in ("tensor", "token", "group") or not sized:
            raise ConfigError(
                f"granularity {self.kind!r} with size {self.size}",
                "kinds are 'tensor', 'token' and 'group', and only a group has a size",
                "use TENSOR, TOKEN or Granularity('group', columns)",
            )

    def __str__(self) -> str:
        return f"group{self.size}" if self.kind == "group" else self.kind


TENSOR = Granularity("tensor")
TOKEN = Granularity("token")

_CODE_NAMES = {torch.float8_e4m3fn: "fp8", torch.float4_e2m1fn_x2: "fp4"}

#: Dtypes that can carry a scale's values; the usual one, which a key's name leaves out, first.
_SCALE_DTYPES = {
    ScaleFormat.FLOAT32: (torch.float32,),
    ScaleFormat.UE8M0: (torch.float8_e8m0fnu, torch.float32),
    ScaleFormat.E4M3: (torch.float8_e4m3fn,),
}


@dataclass(frozen=True)
class QuantKey:
    """The complete description of the quantised input that a linear consumes.

    Attributes:
        code_dtype: `torch.float8_e4m3fn`, or `torch.float4_e2m1fn_x2` (two codes a byte).
        scale_dtype: dtype of the scale tensor.
        scale_format: restriction on the scale's values (a power of two for UE8M0).
        granularity: which elements share a scale.
        static: the scale is calibrated and handed to the producer, not measured.
        symmetric: no zero point; asymmetric keys are refused.
        global_scale: a second, per-tensor float32 scale above the block scales (NVFP4).
        layout: memory layout of block scales.
        row_multiple: codes, and scales of rows, are padded to a multiple of this many rows.
        scale_multiple: block scales are padded to a multiple of this many columns.

    Codes padded in rows, and scales padded in rows or not row-major, are 2-D: all leading
    dimensions of the activation are one.  Padding is zero bytes.

    Raises:
        ConfigError: a combination that no linear can consume.
    """

    code_dtype: torch.dtype
    scale_dtype: torch.dtype
    scale_format: ScaleFormat
    granularity: Granularity
    static: bool
    symmetric: bool = True
    global_scale: bool = False
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR
    row_multiple: int = 1
    scale_multiple: int = 1

    def __post_init__(self) -> None:
        reason = self._refusal()
        if reason:
            raise ConfigError("quant key", reason, "use one of the named keys of branchline.linear")

    def _refusal(self) -> str | None:
        if self.code_dtype not in _CODE_NAMES:
            return f"code dtype {self.code_dtype} is not served (float8_e4m3fn, float4_e2m1fn_x2)"
        carriers = _SCALE_DTYPES.get(self.scale_format)
        if carriers is None:
            return f"scale format {self.scale_format!r} is not served"
        if self.scale_dtype not in carriers:
            served = " or ".join(map(str, carriers))
            return f"{self.scale_format} scales lie in {served}, not in {self.scale_dtype}"
        if not self.symmetric:
            return "asymmetric quantisation is not served"
        if not self.static and self.granularity == TENSOR:
            return "a dynamic per-tensor scale would make a row depend on its neighbours"
        if self.static and self.granularity != TENSOR:
            return f"a static scale is per tensor, not per {self.granularity}"
        if self.row_multiple < 1 or self.scale_multiple < 1:
            return "padding multiples start at 1"
        if self.code_dtype == torch.float4_e2m1fn_x2 and (
            self.scale_format != ScaleFormat.E4M3 or self.granularity.size != 16
        ):
            return "four-bit codes take e4m3 scales in groups of 16 (NVFP4)"
        if (self.scale_format == ScaleFormat.E4M3) != self.global_scale:
            return "a global scale goes with e4m3 block scales, and only with them"
        blockwise = self.granularity.kind == "group"
        if not blockwise and (self.layout != ScaleLayout.ROW_MAJOR or self.scale_multiple != 1):
            return f"layout and scale padding need block scales, not one per {self.granularity}"
        return None

    @property
    def codes_per_byte(self) -> int:
        """How many codes one byte holds: 1, or 2 for the packed four-bit dtype."""
        return 2 if self.code_dtype == torch.float4_e2m1fn_x2 else 1

    @property
    def epilogue(self) -> str:
        """Which quantiser makes the codes: "static", "token", "group" or "nvfp4"."""
        if self.static:
            return "static"
        if self.granularity == TOKEN:
            return "token"
        return "nvfp4" if self.global_scale else "group"

    @property
    def arranged(self) -> bool:
        """Whether codes or scales lie elsewhere than row by row without padding."""
        return self.plain() != self

    @property
    def flat(self) -> bool:
        """Whether scales of rows are 2-D, over all leading dimensions of the activation."""
        return self.row_multiple > 1 or self.layout != ScaleLayout.ROW_MAJOR

    def plain(self) -> QuantKey:
        """The key without layout and padding: what producers are registered for."""
        return replace(self, layout=ScaleLayout.ROW_MAJOR, row_multiple=1, scale_multiple=1)

    def padded_rows(self, rows: int) -> int:
        """Rows of a flat scale tensor for an activation of `rows` rows."""
        rows = _round_up(rows, self.row_multiple)
        return _round_up(rows, 128) if self.layout == ScaleLayout.SWIZZLE_128X4 else rows

    def padded_groups(self, groups: int) -> int:
        """Columns of the scale tensor for `groups` groups a row."""
        groups = _round_up(groups, self.scale_multiple)
        return _round_up(groups, 4) if self.layout == ScaleLayout.SWIZZLE_128X4 else groups

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the code tensor for an activation of `shape` (..., K)."""
        columns = math.ceil(shape[-1] / self.codes_per_byte)
        if self.row_multiple == 1:
            return (*shape[:-1], columns)
        return (_round_up(math.prod(shape[:-1]), self.row_multiple), columns)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale tensor for an activation of `shape` (..., K)."""
        if self.granularity == TENSOR:
            return (1,)
        groups = 1 if self.granularity == TOKEN else math.ceil(shape[-1] / self.granularity.size)
        groups = self.padded_groups(groups)
        if self.flat:
            return (self.padded_rows(math.prod(shape[:-1])), groups)
        return (*shape[:-1], groups)

    def __str__(self) -> str:
        mode = "static" if self.static else "dynamic"
        parts = [_CODE_NAMES[self.code_dtype], mode, str(self.granularity)]
        if self.scale_format != ScaleFormat.FLOAT32:
            parts.append(str(self.scale_format))
        # Whatever keys differ in must show: a mismatch is reported by printing both.
        if self.scale_dtype != _SCALE_DTYPES[self.scale_format][0]:
            parts.append(str(self.scale_dtype).removeprefix("torch."))
        if self.global_scale:
            parts.append("global")
        if self.layout != ScaleLayout.ROW_MAJOR:
            parts.append(str(self.layout))
        if self.row_multiple > 1:
            parts.append(f"rows%{self.row_multiple}")
        if self.scale_multiple > 1:
            parts.append(f"scales%{self.scale_multiple}")
        return "-".join(parts)


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


FP8_STATIC_TENSOR = QuantKey(
    torch.float8_e4m3fn, torch.float32, ScaleFormat.FLOAT32, TENSOR, static=True
)
FP8_DYNAMIC_TOKEN = QuantKey(
    torch.float8_e4m3fn, torch.float32, ScaleFormat.FLOAT32, TOKEN, static=False
)
FP8_DYNAMIC_TOKEN_UE8M0 = replace(FP8_DYNAMIC_TOKEN, scale_format=ScaleFormat.UE8M0)
FP8_DYNAMIC_GROUP128 = QuantKey(
    torch.float8_e4m3fn,
    torch.float32,
    ScaleFormat.FLOAT32,
    Granularity("group", 128),
    static=False,
)
FP8_DYNAMIC_GROUP128_UE8M0 = QuantKey(
    torch.float8_e4m3fn, torch.float32, ScaleFormat.UE8M0, Granularity("group", 128), static=False
)
MXFP8 = QuantKey(
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    ScaleFormat.UE8M0,
    Granularity("group", 32),
    static=False,
)
NVFP4 = QuantKey(
    torch.float4_e2m1fn_x2,
    torch.float8_e4m3fn,
    ScaleFormat.E4M3,
    Granularity("group", 16),
    static=False,
    global_scale=True,
)

#: Every key without layout and padding that has a quantiser, and producers.
KEYS = (
    FP8_STATIC_TENSOR,
    FP8_DYNAMIC_TOKEN,
    FP8_DYNAMIC_TOKEN_UE8M0,
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    MXFP8,
    NVFP4,
)

_TEXT = re.compile(
    "(?P<codes>fp8|fp4)-(?P<mode>static|dynamic)-(?P<kind>tensor|token|group)(?P<size>[0-9]{0,9})"
    "(?:-(?P<format>ue8m0|e4m3))?(?:-(?P<carrier>float32))?(?P<global_scale>-global)?"
    "(?:-(?P<layout>column-major|swizzle-128x4))?"
    "(?:-rows%(?P<rows>[0-9]{1,9}))?(?:-scales%(?P<scales>[0-9]{1,9}))?"
)


@functools.lru_cache(maxsize=256)
def parse_key(text: str) -> QuantKey:
    """The key that prints as `text`: the inverse of ``str(key)``, layout and paddings included.

    Raises:
        ConfigError: no key prints so.
    """
    found = _TEXT.fullmatch(text)
    if found:
        key = _named(found)
        # Another spelling of a key (a leading zero, a padding of 1) is not that key's text.
        if str(key) == text:
            return key
    raise ConfigError(
        f"quant key {text!r}",
        "is no key's text",
        f"use one of {', '.join(map(str, KEYS))}, with -column-major, -swizzle-128x4, -rows%N or "
        "-scales%N behind it where the layout is another, in this order",
    )


def _named(found: re.Match[str]) -> QuantKey:
    scale_format = ScaleFormat(found["format"] or ScaleFormat.FLOAT32)
    usual = _SCALE_DTYPES[scale_format][0]
    return QuantKey(
        next(dtype for dtype, name in _CODE_NAMES.items() if name == found["codes"]),
        torch.float32 if found["carrier"] else usual,
        scale_format,
        Granularity(found["kind"], int(found["size"] or 0)),
        static=found["mode"] == "static",
        global_scale=bool(found["global_scale"]),
        layout=ScaleLayout(found["layout"] or ScaleLayout.ROW_MAJOR),
        row_multiple=int(found["rows"] or 1),
        scale_multiple=int(found["scales"] or 1),
    )
