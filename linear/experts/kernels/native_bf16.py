"""Unquantised bfloat16 experts on the CPU, all of a projection multiplied in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ....core.errors import ContractError, KernelUnavailableError
from ....core.platform import Platform
from ....core.quantized_activation import QuantizedActivation, as_quantized_activation
from ....core.selection import Verdict
from ...contract import InputContract
from ...kernels.native_bf16 import FloatLinearConfig, NativeBf16Linear
from ...kernels.packed import PackedInput
from ...rows import name
from ..find import as_stored, stored_bias, stored_weight
from ..form import ExpertsForm
from ..pairs import Pairs
from .base import GroupedKernel
from .packed import PackedExpertHalves


class NativeBf16Experts(GroupedKernel):
    """Weights in panels of bfloat16, two bytes an element; `of` puts them in a module's place.

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
        self._home: _Home | None = None

    @classmethod
    def of(
        cls, module: nn.Module, form: ExpertsForm, projection: str, *, keeps_weight: bool
    ) -> NativeBf16Experts:
        """The kernel of a projection of a model's own experts.

        Args:
            module: the experts, on the CPU.
            form: how they compute, and how their weights lie.
            projection: name of the parameter.
            keeps_weight: leave the weight in the module, because another one has it too; the
                panels are a second copy then.  Otherwise the parameter is empty until `give_back`.

        Raises:
            KernelUnavailableError: it does not implement such weights.
        """
        weight = stored_weight(module, form, projection)
        kernel = cls(weight, stored_bias(module, form, projection))
        kernel._home = _Home(module, form, projection)
        if not keeps_weight:
            kernel._home.empty()
        return kernel

    def give_back(self) -> None:
        """Let the module have its own weights again, as they were to the bit."""
        if self._home is not None:
            self._home.fill(self.unpacked)

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
        """Bytes that the weights take in memory, with the module's own where those are kept."""
        kept = 0 if self._home is None else self._home.parameter.nbytes
        return self._packed.nbytes + kept

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
                "hand it the model's own activations, or wrap with float_kernel='torch' (command "
                "line: --float-kernel torch)",
            )
        return self._packed.multiply(PackedInput(x, None), pairs, x.dtype, by_token=by_token)


class _Home:
    """The parameter that a kernel's weights came from, and how it lay."""

    def __init__(self, module: nn.Module, form: ExpertsForm, projection: str) -> None:
        self.parameter = module.get_parameter(projection)
        self._form, self._projection = form, projection
        self._taken: tuple[torch.Size, tuple[int, ...]] | None = None

    def empty(self) -> None:
        """Keep nothing of its values."""
        weight = self.parameter
        # Elements that overlap or leave gaps cannot be laid out again.
        if torch.ops.aten.is_non_overlapping_and_dense(weight):
            self._taken = weight.shape, weight.stride()
            weight.data = weight.new_empty(0)

    def fill(self, values: Callable[[], torch.Tensor]) -> None:
        """Lay `values()`, bfloat16 (E, N, K), out as before, where nothing was kept."""
        if self._taken is None:
            return
        size, stride = self._taken
        weight = torch.empty_strided(
            size, stride, dtype=self.parameter.dtype, device=self.parameter.device
        )
        stored = as_stored(values(), self._form, self._projection)
        # As integers, so that no copy of a NaN changes its payload.
        weight.view(torch.int16).copy_(stored.view(torch.int16))
        self.parameter.data = weight
        self._taken = None
