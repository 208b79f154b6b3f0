"""Unquantised bfloat16 weights on the CPU, multiplied by the C kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from transformers.pytorch_utils import Conv1D

from ...core.errors import ContractError, KernelUnavailableError
from ...core.platform import Platform
from ...core.quantized_activation import QuantizedActivation, as_quantized_activation
from ...core.selection import ACCEPTED, Verdict
from ..contract import InputContract
from ..rows import name
from ..weights import LinearModule, float_weight, linear_shape
from .base import LinearKernel
from .packed import PackedBfloat16, PackedInput, multiply


@dataclass(frozen=True)
class FloatLinearConfig:
    """Everything a kernel of an unquantised linear may be chosen by.

    Attributes:
        in_features: K.
        out_features: N.
        dtype: of the weight.
        weight_read: the model reads the weight itself, beside multiplying with it.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    weight_read: bool = False

    @classmethod
    def of(cls, module: LinearModule, *, weight_read: bool) -> FloatLinearConfig:
        """What `module` is."""
        out_features, in_features = linear_shape(module)
        return cls(in_features, out_features, module.weight.dtype, weight_read)


class NativeBf16Linear(LinearKernel):
    """The weight in panels of bfloat16, two bytes an element, in the place of the module's own.

    Sums are float32 and rounded once, bias included; a row's bytes do not depend on its batch
    (`native/matmul.h`).  Gradients are not recorded.

    Args:
        module: a linear on the CPU that `can_implement` accepts.
        keeps_weight: leave the weight in the module, because something else reads it (a tied
            embedding); the panels are a second copy then.  Otherwise the parameter is empty until
            `give_back`.

    Raises:
        KernelUnavailableError: it does not implement such a linear.
    """

    name = "native-bf16"

    def __init__(self, module: LinearModule, *, keeps_weight: bool) -> None:
        verdict = self.can_implement(FloatLinearConfig.of(module, weight_read=False))
        if not verdict.ok:
            raise KernelUnavailableError(
                f"kernel {self.name}", verdict.reason, "choose another kernel"
            )
        self.module = module
        self.contract = InputContract(key=None)
        self.out_features, self.in_features = linear_shape(module)
        weight = module.weight
        self._packed = PackedBfloat16(float_weight(module), module.bias)
        # How the parameter lay, so that it comes back the same way; None while the module has it.
        self._taken: tuple[torch.Size, tuple[int, ...]] | None = None
        # Elements that overlap or leave gaps cannot be laid out again.
        if not keeps_weight and torch.ops.aten.is_non_overlapping_and_dense(weight):
            self._taken = weight.shape, weight.stride()
            weight.data = torch.empty(0, dtype=weight.dtype)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Whether it runs on such a machine at all; pure."""
        if platform.device_type != "cpu":
            return Verdict(False, f"the C kernels run on a CPU, the weight is on {platform}")
        if platform.native_isa is None:
            return Verdict(False, f"the C kernels are absent: {platform.native_reason}")
        return ACCEPTED

    @classmethod
    def can_implement(cls, config: FloatLinearConfig) -> Verdict:
        """Whether it serves such a linear, on a machine that it supports; pure."""
        if config.dtype != torch.bfloat16:
            reason = f"the C matmul multiplies bfloat16, the weight is {name(config.dtype)}"
            return Verdict(False, reason)
        if config.weight_read:
            return Verdict(False, "the model reads the weight itself, which panels do not show")
        if not config.in_features:
            return Verdict(False, "the weight has no columns")
        return ACCEPTED

    @classmethod
    def serves(cls, config: FloatLinearConfig, platform: Platform) -> Verdict:
        """Whether it serves such a linear on such a machine: what a choice asks; pure."""
        verdict = cls.is_supported(platform)
        return cls.can_implement(config) if verdict.ok else verdict

    def give_back(self) -> None:
        """Let the module have its own weight again, as it was to the bit."""
        if self._taken is None:
            return
        size, stride = self._taken
        weight = torch.empty_strided(size, stride, dtype=torch.bfloat16)
        weight.view(torch.int16).copy_(self._as_stored().view(torch.int16))
        self.module.weight.data = weight
        self._taken = None

    def unpacked(self) -> torch.Tensor:
        """bfloat16 (N, K), a copy: the weight to the bit."""
        return self._packed.unpacked()

    def _as_stored(self) -> torch.Tensor:
        weight = self._packed.unpacked()
        return weight.t() if isinstance(self.module, Conv1D) else weight

    def float_weight(self) -> torch.Tensor:
        return self.module.weight if self._taken is None else self._as_stored()

    def dequantized(self) -> torch.Tensor:
        return self._packed.unpacked().float()

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weight takes in memory, with the module's own where that is kept."""
        kept = self.module.weight
        return self._packed.nbytes + kept.numel() * kept.element_size()

    def bias(self) -> torch.Tensor | None:
        return self.module.bias

    def apply(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> torch.Tensor:
        # This is asked for every linear of every forward: what does not fit is looked at then.
        if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
            self._refuse(x, consumer)
        if x.shape[-1:] != (self.in_features,):
            self._refuse(x, consumer)
        (out,) = multiply(PackedInput(x, None), [self._packed], torch.bfloat16)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    def _refuse(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> NoReturn:
        as_quantized_activation(x, None, consumer=consumer)
        raise ContractError(
            consumer,
            f"takes bfloat16 activations of {self.in_features} columns, its input is "
            f"{name(x.dtype)} {tuple(x.shape)}",
            "hand it the model's own activations, or wrap with float_kernel='torch' (command "
            "line: --float-kernel torch)",
        )
