"""Grouped FP8 matmuls in Triton, for the schemes and devices that a linear's kernels are for."""

from __future__ import annotations

import torch

from .....core.quantized_activation import QuantizedActivation
from .....core.selection import Verdict
from ....kernels.triton.fp8 import TritonBlockScaledLinear, TritonRowwiseLinear
from ....outputs import empty
from ...pairs import Pairs
from ...weight import ExpertsWeight
from ..base import GroupedConfig, LikeLinearKernel
from ..stacked import StackedWeight

#: Every program looks for its expert among all of them.
_MOST_EXPERTS = 1024


class TritonExperts(LikeLinearKernel):
    """What both kernels have in common: they serve what a linear's do, and launch once.

    A pair gets the bytes that its expert's linear gives its row, among any number of rows.
    """

    @classmethod
    def can_implement(cls, config: GroupedConfig) -> Verdict:
        if config.experts > _MOST_EXPERTS:
            return Verdict(False, f"it serves {_MOST_EXPERTS} experts a layer, not more")
        return super().can_implement(config)

    def _take(self, weight: ExpertsWeight) -> None:
        self._stack = StackedWeight.of(weight)
        self._bias = None if self._bias is None else self._bias.contiguous()

    @property
    def weight_bytes(self) -> int:
        return self._stack.nbytes

    def quantized_weight(self) -> ExpertsWeight:
        return self._stack.weight()

    def multiply(
        self, x: torch.Tensor | QuantizedActivation, pairs: Pairs, *, by_token: bool
    ) -> torch.Tensor:
        from ....kernels.triton.tile import input_operand, weight_operand
        from .matmul import by_position, launch_grouped_matmul

        assert isinstance(x, QuantizedActivation)
        out = empty((len(pairs), self.out_features), x.orig_dtype, x.device)
        stack, operand = self._stack, input_operand(x)
        launch_grouped_matmul(
            by_position(operand, pairs) if by_token else operand,
            weight_operand(stack.codes, stack.scale, stack.scheme),
            self._bias,
            out,
            pairs,
            by_token=by_token,
            blockwise=stack.scheme.blockwise,
        )
        return out

    def combine(self, out: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        from .combine import combine

        return combine(out, weights, pairs)


class TritonBlockScaledExperts(TritonExperts):
    """Weights with a scale for 128 columns of one or more channels, inputs with one for 128."""

    name = TritonBlockScaledLinear.name
    linear = TritonBlockScaledLinear


class TritonRowwiseExperts(TritonExperts):
    """Weights with a scale a channel or in all, inputs with a scale a token or in all."""

    name = TritonRowwiseLinear.name
    linear = TritonRowwiseLinear
