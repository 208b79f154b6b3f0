"""FP8 matmuls in Triton: where torch has none for the device, the scheme or the shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....core.platform import Platform, release
from ....core.quant_key import QuantKey
from ....core.quantized_activation import QuantizedActivation
from ....core.selection import ACCEPTED, Verdict
from ...outputs import empty
from ...quantized_weight import QuantizedWeight
from ..base import CodesKernel, LinearConfig, block_input
from .plan import STEP

_FIRST_WITH_FLOAT8E4NV = (8, 9)
_FIRST_TRITON = (3, 6)


class TritonLinear(CodesKernel):
    """What both kernels have in common: devices, the weight as it is, and the launch."""

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        if platform.triton_version is None:
            return Verdict(False, "it needs triton, which is not installed")
        if release(platform.triton_version) < _FIRST_TRITON:
            return Verdict(False, f"it needs triton 3.6, {platform.triton_version} is installed")
        if platform.device_type == "cpu" and platform.interpreted:
            return ACCEPTED
        if platform.device_type != "cuda" or platform.capability is None:
            return Verdict(False, f"it runs on NVIDIA devices, the weights are on {platform}")
        if platform.capability < _FIRST_WITH_FLOAT8E4NV:
            return Verdict(False, f"it needs sm_89 or later for FP8, the device is {platform}")
        return ACCEPTED

    def _take(self, weight: QuantizedWeight) -> None:
        self._source = replace(weight, codes=weight.codes.contiguous())
        # The same tensor where scales are float32 already.
        self._scale = weight.scale.float().contiguous()

    @property
    def weight_bytes(self) -> int:
        copied = 0 if self._scale.dtype == self._source.scale.dtype else self._scale.nbytes
        return self._source.nbytes + copied

    def quantized_weight(self) -> QuantizedWeight:
        return self._source

    def multiply(self, x: QuantizedActivation) -> torch.Tensor:
        from .matmul import launch_matmul
        from .tile import input_operand, weight_operand

        shape = (x.orig_shape[:-1].numel(), self.out_features)
        out = empty(shape, x.orig_dtype, x.device)
        scheme = self._source.scheme
        weight = weight_operand(self._source.codes, self._scale, scheme)
        launch_matmul(input_operand(x), weight, self._bias, out, blockwise=scheme.blockwise)
        return out.view(*x.orig_shape[:-1], self.out_features)


class TritonBlockScaledLinear(TritonLinear):
    """Weights with a scale for 128 columns of one or more channels, inputs with one for 128."""

    name = "triton-block"

    @classmethod
    def can_implement(cls, config: LinearConfig) -> Verdict:
        weight, key = config.scheme.weight, config.scheme.input
        if weight.code_dtype != torch.float8_e4m3fn or weight.columns != STEP:
            return Verdict(
                False, f"its weights have a scale for {STEP} columns of FP8, not {weight}"
            )
        if key is None or key.granularity.size != STEP or key.scale_dtype != torch.float32:
            named = key or "unquantised ones"
            return Verdict(
                False, f"its inputs have a float32 scale for {STEP} columns, not {named}"
            )
        return _positive(config)

    @classmethod
    def consumes(cls, config: LinearConfig) -> QuantKey | None:
        key = config.scheme.input
        return key and block_input(key)


class TritonRowwiseLinear(TritonLinear):
    """Weights with a scale a channel or in all, inputs with a scale a token or in all."""

    name = "triton-rowwise"

    @classmethod
    def can_implement(cls, config: LinearConfig) -> Verdict:
        weight, key = config.scheme.weight, config.scheme.input
        if weight.code_dtype != torch.float8_e4m3fn or weight.blockwise or weight.rows > 1:
            return Verdict(False, f"its weights have a scale a channel or one in all, not {weight}")
        if key is None or key.code_dtype != torch.float8_e4m3fn or key.granularity.size:
            named = key or "unquantised ones"
            return Verdict(False, f"its inputs have a scale a token or one in all, not {named}")
        return _positive(config)


def _positive(config: LinearConfig) -> Verdict:
    if config.in_features and config.out_features:
        return ACCEPTED
    return Verdict(False, "an empty weight has nothing to multiply")
