"""Unquantised bfloat16 experts on the CPU, all of a projection multiplied in one call."""

from __future__ import annotations

import torch

from ....core.errors import ContractError, KernelUnavailableError
from ....core.platform import Platform
from ....core.quantized_activation import QuantizedActivation, as_quantized_activation
from ....core.selection import Verdict
from ...contract import InputContract
from ...kernels.native_bf16 import FloatLinearConfig, NativeBf16Linear
from ...kernels.packed import PackedInput
from ...rows import name
from ..pairs import Pairs
from .base import GroupedKernel
from .packed import PackedExpertHalves


class NativeBf16Experts(GroupedKernel):
    """Weights in panels of bfloat16: a copy, two bytes an element.

    Sums are float32 and rounded once, bias included; a pair's bytes are those of
    `NativeBf16Linear` on its row.

    Args:
        weight: bfloat16 (E, N, K), E at least 1, on the CPU.
        bias: (E, N), or None.

    Raises:
        KernelUnavailableError: it does not implement such weights.
    """

    name = "native-bf16"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.experts, self.out_features, self.in_features = weight.shape
        verdict = self.can_implement(
            FloatLinearConfig(self.in_features, self.out_features, weight.dtype)
        )
        if not verdict.ok:
            raise KernelUnavailableError(
                f"kernel {self.name}", verdict.reason, "choose another kernel"
            )
        self.contract = InputContract(key=None)
        self._bias = None if bias is None else bias.detach()
        self._packed = PackedExpertHalves(weight.detach(), self._bias)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Whether it runs on such a machine at all; pure."""
        return NativeBf16Linear.is_supported(platform)

    @classmethod
    def can_implement(cls, config: FloatLinearConfig) -> Verdict:
        """Whether it serves experts of which each is such a linear; pure."""
        return NativeBf16Linear.can_implement(config)

    @property
    def weight_bytes(self) -> int:
        return self._packed.nbytes

    def unpacked(self) -> torch.Tensor:
        """bfloat16 (E, N, K), a copy: the weights to the bit."""
        return self._packed.unpacked()

    def dequantized(self) -> torch.Tensor:
        return self._packed.unpacked().float()

    def bias(self) -> torch.Tensor | None:
        return self._bias

    def apply(
        self,
        x: torch.Tensor | QuantizedActivation,
        pairs: Pairs,
        consumer: str,
        *,
        by_token: bool,
    ) -> torch.Tensor:
        as_quantized_activation(x, None, consumer=consumer)
        assert isinstance(x, torch.Tensor)
        self.check_rows(x.shape, pairs, consumer, by_token=by_token)
        if x.dtype != torch.bfloat16:
            raise ContractError(
                consumer,
                f"takes bfloat16 activations, its input is {name(x.dtype)}",
                "hand it the model's own activations",
            )
        return self._packed.multiply(PackedInput(x, None), pairs, x.dtype, by_token=by_token)
