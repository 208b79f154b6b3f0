"""torch's grouped scaled matmul on Hopper: codes times codes, expert by expert, in one call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from ....core.errors import ContractError
from ....core.platform import Platform
from ....core.quantized_activation import QuantizedActivation
from ....core.selection import Verdict
from ...kernels.torch_recipes import RowRecipe, TensorRecipe, find_recipe
from ...kernels.torch_scaled import TorchScaledLinear
from ..pairs import Pairs
from ..weight import ExpertsWeight
from .base import GroupedConfig, QuantizedGroupedKernel
from .stacked import StackedWeight

#: The library counts experts with one thread each.
_MOST_EXPERTS = 1023


class TorchScaledExperts(QuantizedGroupedKernel):
    """`torch.nn.functional.scaled_grouped_mm`, for bfloat16 activations.

    The library chooses its tiles by the number of pairs and of experts.  It says nothing about
    rows: those of a batch of another size may differ in a last bit, and that a pair's bytes do not
    hang on how many share its expert is not promised, as it is of every other grouped kernel.  So
    it comes behind those that promise it, and only who names it gets it.

    Rounding: the library rounds its float32 sums to bfloat16.  It adds no bias: one is added to
    that in float32, and the sum rounded again.
    """

    name = TorchScaledLinear.name

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        verdict = TorchScaledLinear.is_supported(platform)
        if not verdict.ok or platform.capability == (9, 0):
            return verdict
        return Verdict(False, f"torch has a grouped one for sm_90, the device is {platform}")

    @classmethod
    def can_implement(cls, config: GroupedConfig) -> Verdict:
        if config.experts > _MOST_EXPERTS:
            return Verdict(False, f"torch takes {_MOST_EXPERTS} experts, not {config.experts}")
        verdict = TorchScaledLinear.can_implement(config.linear)
        recipe = find_recipe(config.linear.scheme)
        if verdict.ok and not isinstance(recipe, TensorRecipe | RowRecipe):
            return Verdict(False, f"torch has no grouped matmul of {config.linear.scheme}")
        return verdict

    def _take(self, weight: ExpertsWeight) -> None:
        self._stack = StackedWeight.of(weight)
        # The library reads memory as if every channel had its own.
        scale = self._stack.scale.flatten(1)
        self._scale = scale.expand(-1, self.out_features).contiguous()

    @property
    def weight_bytes(self) -> int:
        copied = 0 if self._scale.data_ptr() == self._stack.scale.data_ptr() else self._scale.nbytes
        return self._stack.nbytes + copied

    def quantized_weight(self) -> ExpertsWeight:
        return self._stack.weight()

    def multiply(
        self, x: torch.Tensor | QuantizedActivation, pairs: Pairs, *, by_token: bool
    ) -> torch.Tensor:
        assert isinstance(x, QuantizedActivation)
        if x.orig_dtype != torch.bfloat16:
            raise ContractError(
                f"kernel {self.name}",
                f"torch multiplies experts for bfloat16 activations, not for {x.orig_dtype}",
                "load the model in bfloat16, or drop the forced kernel",
            )
        if not len(pairs):
            return x.codes.new_empty((0, self.out_features), dtype=x.orig_dtype)
        codes, scale = _rows(x, pairs, by_token=by_token)
        recipe = [ScalingType.RowWise]
        # torch's type stubs leave it out.
        library: Any = F
        out = library.scaled_grouped_mm(
            codes,
            self._stack.codes.transpose(1, 2),
            [scale],
            recipe,
            [self._scale],
            recipe,
            offs=pairs.offsets[1:],
            output_dtype=torch.bfloat16,
        )
        if self._bias is None:
            return out
        # Pairs of no expert here are computed by nobody, and take any expert's.
        bias = self._bias[pairs.expert.clamp(max=self.experts - 1)]
        return (out + bias).to(torch.bfloat16)


def _rows(
    x: QuantizedActivation, pairs: Pairs, *, by_token: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (P, K) and float32 scales (P,), by position."""
    codes, scale = x.codes.contiguous(), x.scale.reshape(-1)
    if by_token:
        # As bytes: torch gathers no rows of one-byte floats.
        codes = codes.view(torch.uint8)[pairs.token].view(codes.dtype)
    if x.quant_key.static:
        return codes, scale.expand(len(pairs)).contiguous()
    return codes, (scale[pairs.token] if by_token else scale).contiguous()
