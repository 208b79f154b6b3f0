"""FP8 weights on the CPU: one byte an element in memory, decoded in registers by the C kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core import native
from ...core.errors import ContractError
from ...core.platform import Platform
from ...core.quant_key import QuantKey
from ...core.quantized_activation import QuantizedActivation, as_quantized_activation
from ...core.selection import ACCEPTED, Verdict
from ..quantized_weight import QuantizedWeight
from .base import CodesKernel, LinearConfig, LinearKernel, QuantizedKernel
from .packed import PackedInput, PackedWeight, multiply, packing_refusal


def _supported(platform: Platform) -> Verdict:
    if platform.device_type != "cpu":
        return Verdict(False, f"the C kernels run on a CPU, the weights are on {platform}")
    if platform.native_isa is None:
        return Verdict(False, f"the C kernels are absent: {platform.native_reason}")
    return ACCEPTED


def _implements(config: LinearConfig) -> Verdict:
    weight, key = config.scheme.weight, config.scheme.input
    if weight.code_dtype != torch.float8_e4m3fn:
        return Verdict(False, f"the C matmul decodes FP8 weights, not {weight}")
    if key is not None and key.code_dtype != torch.float8_e4m3fn:
        return Verdict(False, f"the C matmul decodes FP8 inputs, not {key}")
    group = key.granularity.size if key is not None else 0
    reason = packing_refusal(weight.rows, weight.columns, group)
    return Verdict(False, reason) if reason else ACCEPTED


class NativeFp8Linear(CodesKernel):
    """FP8 codes times FP8 weights; a row's bytes do not depend on its batch."""

    name = "native-fp8"

    @property
    def group(self) -> tuple[NativeFp8Linear, ...]:
        """The kernels that are computed in one call with this one, itself among them."""
        return self._group or (self,)

    def join(self, group: tuple[NativeFp8Linear, ...]) -> None:
        """Be computed together with `group`, which takes the same codes; empty to be alone."""
        self._group = group

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        return _supported(platform)

    @classmethod
    def can_implement(cls, config: LinearConfig) -> Verdict:
        if config.scheme.input is None:
            return Verdict(False, "it multiplies codes, and this linear's input stays unquantised")
        return _implements(config)

    def _take(self, weight: QuantizedWeight) -> None:
        self._packed = PackedWeight(weight, self._bias, self.contract.key)
        self._group: tuple[NativeFp8Linear, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return self._packed.nbytes

    def quantized_weight(self) -> QuantizedWeight:
        return self._packed.unpacked()

    def multiply(self, x: QuantizedActivation) -> torch.Tensor:
        siblings = x.shared_outputs
        out = None if siblings is None else siblings.pop(self, None)
        if out is None:
            # Who shares the input computes once for all: one call, and its threads share the work.
            kernels = (self,) if siblings is None else self.group
            packed = PackedInput(x.codes, x.scale)
            weights = [kernel._packed for kernel in kernels]
            outs = dict(
                zip(kernels, multiply(packed, weights, _out_dtype(x.orig_dtype)), strict=True)
            )
            out = outs.pop(self)
            if siblings is not None:
                siblings.update(outs)
        return _as_activation(out, x.orig_dtype, x.orig_shape)


class NativeW8A16Linear(QuantizedKernel):
    """FP8 weights times unquantised activations, without a dequantised copy of the weights."""

    name = "native-w8a16"

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        return _supported(platform)

    @classmethod
    def can_implement(cls, config: LinearConfig) -> Verdict:
        return _implements(config)

    @classmethod
    def consumes(cls, config: LinearConfig) -> QuantKey | None:
        return None

    def _take(self, weight: QuantizedWeight) -> None:
        self._packed = PackedWeight(weight, self._bias, None)

    @property
    def weight_bytes(self) -> int:
        return self._packed.nbytes

    def quantized_weight(self) -> QuantizedWeight:
        return self._packed.unpacked()

    def apply(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> torch.Tensor:
        as_quantized_activation(x, None, consumer=consumer)
        assert isinstance(x, torch.Tensor)
        self.check_width(x.shape, consumer)
        if not x.dtype.is_floating_point:
            raise ContractError(
                consumer, f"takes floating-point activations, not {x.dtype}", "cast it first"
            )
        values = x if x.dtype == torch.bfloat16 else x.float()
        (out,) = multiply(PackedInput(values, None), [self._packed], _out_dtype(x.dtype))
        return _as_activation(out, x.dtype, x.shape)


def _as_activation(out: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """(M, N) as (..., N) for an input of `shape`."""
    if out.dtype != dtype:
        out = out.to(dtype)
    return out if len(shape) == 2 else out.view(*shape[:-1], out.shape[1])


def _out_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def group_siblings(kernels: Sequence[LinearKernel]) -> None:
    """Let those of `kernels`, which read one tensor, that take the same codes be one call."""
    taken: list[NativeFp8Linear] = [k for k in kernels if isinstance(k, NativeFp8Linear)]
    for kernel in taken:
        same = [other for other in taken if other.contract.same_input(kernel.contract)]
        # A kernel may serve two of the layers (a tied weight): it is computed once.
        group = tuple(dict.fromkeys(same))[: native.MATMULS]
        kernel.join(group if kernel in group else ())
