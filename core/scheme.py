"""How a linear is quantised: its weight's codes and scales, and the input it consumes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .errors import ConfigError
from .quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
    NVFP4,
    QuantKey,
    ScaleFormat,
)


@dataclass(frozen=True)
class WeightScheme:
    """Which elements of a weight (N, K) share a scale, and what the scales may be.

    Attributes:
        rows: output channels that share a scale; 0 for all of them.
        columns: neighbouring inputs that share a scale; 0 for all of them.
        code_dtype: `torch.float8_e4m3fn`, or `torch.float4_e2m1fn_x2` (two codes a byte).
        scale_format: restriction on the scales' values.
        global_scale: a per-tensor float32 scale above the block scales (NVFP4).

    Raises:
        ConfigError: a combination that no format has.
    """

    rows: int
    columns: int
    code_dtype: torch.dtype = torch.float8_e4m3fn
    scale_format: ScaleFormat = ScaleFormat.FLOAT32
    global_scale: bool = False

    def __post_init__(self) -> None:
        reason = self._refusal()
        if reason:
            raise ConfigError(f"weight scheme {self}", reason, "use one of branchline.core.SCHEMES")

    def _refusal(self) -> str | None:
        negative = min(self.rows, self.columns) < 0
        if negative or (self.rows == 0) != (self.columns == 0 and self.rows != 1):
            return f"{self.rows} rows and {self.columns} columns are no block"
        fp4 = self.code_dtype == torch.float4_e2m1fn_x2
        if not fp4 and self.code_dtype != torch.float8_e4m3fn:
            return f"code dtype {self.code_dtype} is not served (float8_e4m3fn, float4_e2m1fn_x2)"
        if fp4 != (self.scale_format == ScaleFormat.E4M3) or fp4 != self.global_scale:
            return "four-bit codes go with e4m3 block scales and a global scale, and only they do"
        if fp4 and (self.rows, self.columns) != (1, 16):
            return "four-bit codes take a scale for 16 columns of one row (NVFP4)"
        return None

    @property
    def per_tensor(self) -> bool:
        """One scale for the whole weight."""
        return self.rows == 0

    @property
    def per_channel(self) -> bool:
        """One scale for each output channel."""
        return self.rows == 1 and self.columns == 0

    @property
    def blockwise(self) -> bool:
        """Scales differ along K."""
        return self.columns > 0

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Shape of the scales of a weight (N, K)."""
        rows = 1 if self.rows == 0 else -(-out_features // self.rows)
        columns = 1 if self.columns == 0 else -(-in_features // self.columns)
        return rows, columns

    def __str__(self) -> str:
        if self.per_tensor:
            where = "tensor"
        elif self.per_channel:
            where = "channel"
        else:
            where = f"block{self.rows}x{self.columns}"
        codes = "fp4" if self.code_dtype == torch.float4_e2m1fn_x2 else "fp8"
        restricted = self.scale_format not in (ScaleFormat.FLOAT32, ScaleFormat.E4M3)
        return f"{codes}-{where}" + (f"-{self.scale_format}" if restricted else "")


PER_TENSOR = WeightScheme(0, 0)
PER_CHANNEL = WeightScheme(1, 0)
BLOCK_128 = WeightScheme(128, 128)
BLOCK_128_UE8M0 = replace(BLOCK_128, scale_format=ScaleFormat.UE8M0)
MX_WEIGHT = WeightScheme(1, 32, scale_format=ScaleFormat.UE8M0)
NVFP4_WEIGHT = WeightScheme(
    1,
    16,
    code_dtype=torch.float4_e2m1fn_x2,
    scale_format=ScaleFormat.E4M3,
    global_scale=True,
)


@dataclass(frozen=True)
class LinearScheme:
    """One linear's quantisation.

    Attributes:
        weight: of its weight.
        input: the key of the input it consumes; None where activations stay unquantised.
    """

    weight: WeightScheme
    input: QuantKey | None

    @property
    def static(self) -> bool:
        """Its input has one calibrated scale."""
        return self.input is not None and self.input.static

    @property
    def calibrated(self) -> bool:
        """Its input has a scale that is measured beforehand: the one, or NVFP4's global one."""
        return self.input is not None and (self.input.static or self.input.global_scale)

    def __str__(self) -> str:
        return f"{self.weight} x {self.input or 'unquantised inputs'}"


#: What `quantize` writes and `wrap` makes, by the names users give.
SCHEMES = {
    "fp8-static": LinearScheme(PER_CHANNEL, FP8_STATIC_TENSOR),
    "fp8-dynamic": LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
    "fp8-block": LinearScheme(BLOCK_128, FP8_DYNAMIC_GROUP128),
    "fp8-block-ue8m0": LinearScheme(BLOCK_128_UE8M0, FP8_DYNAMIC_GROUP128_UE8M0),
    "fp8-weight-only": LinearScheme(PER_CHANNEL, None),
    "mxfp8": LinearScheme(MX_WEIGHT, MXFP8),
    "nvfp4": LinearScheme(NVFP4_WEIGHT, NVFP4),
}
