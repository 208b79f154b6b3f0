"""How torch's scaled matmul takes each scheme: for which devices, and with scales laid out how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from ...core.oracle.quantize import arrange
from ...core.platform import Platform
from ...core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    MXFP8,
    NVFP4,
    QuantKey,
    ScaleLayout,
)
from ...core.quantized_activation import QuantizedActivation
from ...core.scheme import BLOCK_128, BLOCK_128_UE8M0, MX_WEIGHT, NVFP4_WEIGHT, LinearScheme
from ...core.selection import ACCEPTED, Verdict
from ..quantized_weight import QuantizedWeight
from .base import block_input

_SWIZZLED = SwizzleType.SWIZZLE_32_4_4
_PLAIN = SwizzleType.NO_SWIZZLE


@dataclass(frozen=True)
class Call:
    """What one side's `scaled_mm` argument is called.

    Attributes:
        recipe: levels of scales.
        swizzle: layout of each.
    """

    recipe: tuple[ScalingType, ...]
    swizzle: tuple[SwizzleType, ...]


class ScaledRecipe(ABC):
    """One way of scaling that the library has.

    Attributes:
        x: of the activation.
        weight: of the weight.
        multiple: what K is a multiple of.
        out_multiple: what N is a multiple of.
        adds_bias: the library adds a bfloat16 bias before it rounds.
        only_bfloat16: that is the one output that every version of the library has.
    """

    x: ClassVar[Call]
    weight: ClassVar[Call]
    multiple: ClassVar[int] = 16
    out_multiple: ClassVar[int] = 16
    adds_bias: ClassVar[bool] = False
    only_bfloat16: ClassVar[bool] = False

    @abstractmethod
    def takes(self, scheme: LinearScheme) -> bool:
        """Whether it is this scheme's."""

    def runs(self, platform: Platform) -> Verdict:
        """Whether the library has it for a device of sm_89 or later; pure."""
        return ACCEPTED

    def consumes(self, key: QuantKey) -> QuantKey:
        """The key with the layout that the library reads."""
        return key

    def input_scales(self, x: QuantizedActivation) -> list[torch.Tensor]:
        """Of the activation."""
        return [x.scale]

    @abstractmethod
    def lay_out(self, weight: QuantizedWeight) -> torch.Tensor:
        """The weight's scales as the library reads them; the global one apart."""

    @abstractmethod
    def take_back(self, scale: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        """The inverse of `lay_out`: `scheme.scale_shape` of a weight without its scales."""


class TensorRecipe(ScaledRecipe):
    """One scale on each side."""

    x = weight = Call((ScalingType.TensorWise,), (_PLAIN,))
    adds_bias = True

    def takes(self, scheme: LinearScheme) -> bool:
        return scheme.weight.per_tensor and scheme.static

    def lay_out(self, weight: QuantizedWeight) -> torch.Tensor:
        return weight.scale.float().reshape(1)

    def take_back(self, scale: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        return scale.reshape(1, 1)


class RowRecipe(ScaledRecipe):
    """A scale a token and a scale a channel; one in all is repeated."""

    x = weight = Call((ScalingType.RowWise,), (_PLAIN,))
    adds_bias = only_bfloat16 = True

    def takes(self, scheme: LinearScheme) -> bool:
        key, weight = scheme.input, scheme.weight
        rows = key is not None and not key.granularity.size
        return rows and (weight.per_channel or (weight.per_tensor and not scheme.static))

    def runs(self, platform: Platform) -> Verdict:
        assert platform.capability is not None
        if platform.capability < (12, 0):
            return ACCEPTED
        return Verdict(False, f"cuBLAS refuses a scale a row on sm_120, the device is {platform}")

    def input_scales(self, x: QuantizedActivation) -> list[torch.Tensor]:
        # The library reads memory as if every row had its own.
        rows = x.orig_shape[:-1].numel()
        return [x.scale.reshape(-1, 1).expand(rows, 1).contiguous()]

    def lay_out(self, weight: QuantizedWeight) -> torch.Tensor:
        return weight.scale.float().reshape(1, -1).expand(1, weight.out_features).contiguous()

    def take_back(self, scale: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        rows, _ = weight.scheme.scale_shape(weight.out_features, weight.in_features)
        return scale[:, :rows].reshape(rows, 1)


class BlockRecipe(ScaledRecipe):
    """Groups of 128 columns of the activation, blocks of 128 x 128 of the weight."""

    x = Call((ScalingType.BlockWise1x128,), (_PLAIN,))
    weight = Call((ScalingType.BlockWise128x128,), (_PLAIN,))
    # Only whole blocks: torch counts the others up in one place and down in another.
    multiple = out_multiple = 128

    def takes(self, scheme: LinearScheme) -> bool:
        keys = (FP8_DYNAMIC_GROUP128, FP8_DYNAMIC_GROUP128_UE8M0)
        return scheme.input in keys and scheme.weight in (BLOCK_128, BLOCK_128_UE8M0)

    def runs(self, platform: Platform) -> Verdict:
        assert platform.capability is not None
        if platform.capability[0] != 9:
            return Verdict(False, f"cuBLAS has 128 x 128 blocks on sm_90, the device is {platform}")
        return _built_with(platform, (12, 9), "blocks")

    def consumes(self, key: QuantKey) -> QuantKey:
        return block_input(key)

    def lay_out(self, weight: QuantizedWeight) -> torch.Tensor:
        scale = weight.scale.float()
        return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()

    def take_back(self, scale: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        _, columns = weight.scheme.scale_shape(weight.out_features, weight.in_features)
        return scale.t()[:, :columns].contiguous()


class MxRecipe(ScaledRecipe):
    """Groups of 32 columns, scaled by powers of two."""

    x = weight = Call((ScalingType.BlockWise1x32,), (_SWIZZLED,))
    plain: ClassVar[QuantKey] = MXFP8
    multiple = 32

    def takes(self, scheme: LinearScheme) -> bool:
        return scheme == LinearScheme(MX_WEIGHT, MXFP8)

    def runs(self, platform: Platform) -> Verdict:
        assert platform.capability is not None
        if platform.capability < (10, 0):
            reason = f"{self.plain} needs sm_100 or later, the device is {platform}"
            return Verdict(False, reason)
        return _built_with(platform, (12, 8), str(self.plain))

    def consumes(self, key: QuantKey) -> QuantKey:
        return replace(key, layout=ScaleLayout.SWIZZLE_128X4)

    def lay_out(self, weight: QuantizedWeight) -> torch.Tensor:
        # A weight's rows are laid out as an activation's.
        scale = weight.scale.to(self.plain.scale_dtype).contiguous()
        return arrange(weight.codes, scale, self.consumes(self.plain))[1]

    def take_back(self, scale: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        rows, groups = weight.scheme.scale_shape(weight.out_features, weight.in_features)
        high, wide = scale.shape
        tiles = scale.view(torch.uint8).view(high // 128, wide // 4, 32, 4, 4)
        plain = tiles.permute(0, 3, 2, 1, 4).reshape(high, wide)[:rows, :groups]
        return plain.contiguous().view(scale.dtype)


class Nvfp4Recipe(MxRecipe):
    """Groups of 16 columns of four-bit codes, scaled by e4m3 numbers and one float32."""

    x = weight = Call(
        (ScalingType.BlockWise1x16, ScalingType.TensorWise),
        (_SWIZZLED, _PLAIN),
    )
    plain = NVFP4

    def takes(self, scheme: LinearScheme) -> bool:
        return scheme == LinearScheme(NVFP4_WEIGHT, NVFP4)

    def input_scales(self, x: QuantizedActivation) -> list[torch.Tensor]:
        assert x.global_scale is not None
        return [x.scale, x.global_scale]


RECIPES: tuple[ScaledRecipe, ...] = (
    TensorRecipe(),
    RowRecipe(),
    BlockRecipe(),
    MxRecipe(),
    Nvfp4Recipe(),
)


def find_recipe(scheme: LinearScheme) -> ScaledRecipe | None:
    """The library's way of multiplying `scheme`; None if it has none."""
    key = scheme.input
    if key is None or key.code_dtype != scheme.weight.code_dtype:
        return None
    return next((recipe for recipe in RECIPES if recipe.takes(scheme)), None)


def _built_with(platform: Platform, needed: tuple[int, int], what: str) -> Verdict:
    built = platform.cuda_version
    if built is not None and built >= needed:
        return ACCEPTED
    version = "none" if built is None else f"{built[0]}.{built[1]}"
    named = f"{needed[0]}.{needed[1]}"
    return Verdict(False, f"cuBLAS has {what} from CUDA {named} on, torch was built with {version}")
