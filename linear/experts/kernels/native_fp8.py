"""FP8 experts on the CPU: a byte an element in memory, all experts of a projection in one call."""

from __future__ import annotations

import torch

from ....core.errors import ContractError
from ....core.quantized_activation import QuantizedActivation, as_quantized_activation
from ...kernels.native_fp8 import NativeFp8Linear, NativeW8A16Linear
from ...kernels.packed import PackedInput
from ..pairs import Pairs
from ..weight import ExpertsWeight
from .base import LikeLinearKernel
from .packed import PackedExpertCodes


class _NativeExperts(LikeLinearKernel):
    """A pair's bytes are those of the linear's kernel on its row."""

    def _take(self, weight: ExpertsWeight) -> None:
        self._packed = PackedExpertCodes(weight, self._bias, self.contract.key)

    @property
    def weight_bytes(self) -> int:
        return self._packed.nbytes

    def quantized_weight(self) -> ExpertsWeight:
        return self._packed.unpacked()

    def _product(
        self, x: PackedInput, pairs: Pairs, dtype: torch.dtype, *, by_token: bool
    ) -> torch.Tensor:
        """(P, N) in `dtype`."""
        computed = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        out = self._packed.multiply(x, pairs, computed, by_token=by_token)
        return out if dtype == computed else out.to(dtype)


class NativeFp8Experts(_NativeExperts):
    """FP8 codes times FP8 weights."""

    name = "native-fp8"
    linear = NativeFp8Linear

    def multiply(
        self, x: torch.Tensor | QuantizedActivation, pairs: Pairs, *, by_token: bool
    ) -> torch.Tensor:
        assert isinstance(x, QuantizedActivation)
        packed = PackedInput(x.codes, x.scale)
        return self._product(packed, pairs, x.orig_dtype, by_token=by_token)


class NativeW8A16Experts(_NativeExperts):
    """FP8 weights times unquantised activations, without a dequantised copy of the weights."""

    name = "native-w8a16"
    linear = NativeW8A16Linear

    def apply(
        self,
        x: torch.Tensor | QuantizedActivation,
        pairs: Pairs,
        consumer: str,
        *,
        by_token: bool,
    ) -> torch.Tensor:
        as_quantized_activation(x, None, consumer=consumer)
        if not x.dtype.is_floating_point:
            raise ContractError(
                consumer, f"takes floating-point activations, not {x.dtype}", "cast it first"
            )
        return super().apply(x, pairs, consumer, by_token=by_token)

    def multiply(
        self, x: torch.Tensor | QuantizedActivation, pairs: Pairs, *, by_token: bool
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        values = x if x.dtype == torch.bfloat16 else x.float()
        return self._product(PackedInput(values, None), pairs, x.dtype, by_token=by_token)
