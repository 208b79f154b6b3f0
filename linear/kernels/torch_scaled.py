"""torch's scaled matmul on NVIDIA devices: codes times codes in tensor cores, scales in the end."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ...core.platform import Platform, release
from ...core.quant_key import QuantKey
from ...core.quantized_activation import QuantizedActivation
from ...core.scheme import LinearScheme
from ...core.selection import ACCEPTED, Verdict
from ..quantized_weight import QuantizedWeight
from .base import CodesKernel, LinearConfig
from .torch_recipes import TensorRecipe, find_recipe

_FIRST_WITH_FP8 = (8, 9)
_FIRST_TORCH = (2, 11)


class TorchScaledLinear(CodesKernel):
    """`torch.nn.functional.scaled_mm`; the weight's codes lie as they came.

    Rounding: the library rounds its float32 sums once, to bfloat16, if that is the activation's
    dtype and the bias, if any, is one it adds exactly.  Otherwise it writes float32, and what is
    left (the bias, scales of rows, whose other dtypes depend on the library's version) follows.
    """

    name = "torch-scaled-mm"

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        if platform.hip:
            return Verdict(False, f"it is not served under ROCm, the weights are on {platform}")
        if platform.device_type != "cuda" or platform.capability is None:
            return Verdict(False, f"it runs on NVIDIA devices, the weights are on {platform}")
        if release(platform.torch_version) < _FIRST_TORCH:
            return Verdict(False, f"it needs torch 2.11, {platform.torch_version} is installed")
        if platform.capability < _FIRST_WITH_FP8:
            return Verdict(False, f"it needs sm_89 or later for FP8, the device is {platform}")
        return ACCEPTED

    @classmethod
    def can_implement(cls, config: LinearConfig) -> Verdict:
        recipe = find_recipe(config.scheme)
        if recipe is None:
            return Verdict(False, f"torch has no scaled matmul of {config.scheme}")
        for name, size, multiple in (
            ("K", config.in_features, recipe.multiple),
            ("N", config.out_features, recipe.out_multiple),
        ):
            if size == 0 or size % multiple:
                return Verdict(False, f"torch needs a multiple of {multiple} as {name}, not {size}")
        return ACCEPTED

    @classmethod
    def serves(cls, config: LinearConfig, platform: Platform) -> Verdict:
        verdict = super().serves(config, platform)
        recipe = find_recipe(config.scheme)
        return recipe.runs(platform) if verdict.ok and recipe is not None else verdict

    @classmethod
    def consumes(cls, config: LinearConfig) -> QuantKey | None:
        key, recipe = config.scheme.input, find_recipe(config.scheme)
        return key if key is None or recipe is None else recipe.consumes(key)

    def _take(self, weight: QuantizedWeight) -> None:
        assert self.contract.key is not None
        recipe = find_recipe(LinearScheme(weight.scheme, self.contract.key.plain()))
        assert recipe is not None, "can_implement() was asked"
        self._recipe, self._scale_dtype = recipe, weight.scale.dtype
        self._scale = recipe.lay_out(weight)
        # Scales live in the library's layout alone.
        self._source = replace(weight, codes=_contiguous(weight.codes), scale=weight.scale[:0])
        self._one = torch.ones(1, device=weight.codes.device)
        self._added_bias = self._bias_to_add()

    def _bias_to_add(self) -> torch.Tensor | None:
        """The bias in bfloat16, if the library can add it and no bit is lost."""
        if self._bias is None or not self._recipe.adds_bias:
            return None
        rounded = self._bias.bfloat16()
        return rounded if torch.equal(rounded.float(), self._bias) else None

    @property
    def weight_bytes(self) -> int:
        return self._source.nbytes + self._scale.numel() * self._scale.element_size()

    def quantized_weight(self) -> QuantizedWeight:
        scale = self._recipe.take_back(self._scale, self._source)
        return replace(self._source, scale=scale.to(self._scale_dtype))

    def multiply(self, x: QuantizedActivation) -> torch.Tensor:
        shape = (*x.orig_shape[:-1], self.out_features)
        rows = x.orig_shape[:-1].numel()
        if not rows:
            return x.codes.new_empty(shape, dtype=x.orig_dtype)
        whole = self._bias is None or self._added_bias is not None
        if whole and x.orig_dtype == torch.bfloat16:
            return self._scaled(x, torch.bfloat16, self._added_bias)[:rows].view(shape)
        out = self._unscaled(x) if self._recipe.only_bfloat16 else self._scaled(x, torch.float32)
        out = out[:rows]
        if self._bias is not None:
            out += self._bias
        return out.to(x.orig_dtype).view(shape)

    def _scaled(
        self, x: QuantizedActivation, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(M, N), rows that only pad included."""
        recipe, given = self._recipe, self._source.global_scale
        return F.scaled_mm(
            _rows(x.codes),
            self._source.codes.t(),
            recipe.input_scales(x),
            list(recipe.x.recipe),
            [self._scale] if given is None else [self._scale, given],
            list(recipe.weight.recipe),
            list(recipe.x.swizzle),
            list(recipe.weight.swizzle),
            bias=bias,
            output_dtype=dtype,
        )

    def _unscaled(self, x: QuantizedActivation) -> torch.Tensor:
        """float32 (M, N) of a scale a row, multiplied in behind the library."""
        (one,) = TensorRecipe.x.recipe
        out = F.scaled_mm(
            _rows(x.codes),
            self._source.codes.t(),
            self._one,
            one,
            self._one,
            one,
            output_dtype=torch.float32,
        )
        out *= self._scale
        out *= x.scale.reshape(-1, 1)
        return out


def _rows(codes: torch.Tensor) -> torch.Tensor:
    return _contiguous(codes).reshape(-1, codes.shape[-1])


def _contiguous(codes: torch.Tensor) -> torch.Tensor:
    # torch copies no four-bit codes, but bytes.
    return codes.view(torch.uint8).contiguous().view(codes.dtype)
