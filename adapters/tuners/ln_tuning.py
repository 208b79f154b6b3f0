"""LN tuning: norms with weights of an adapter's own."""

from __future__ import annotations

from collections.abc import Mapping

from ..base import TargetNorm
from ..lowering import ln_tuning as lowering
from ..lowering.base import Effect
from ..weights import AnyWeights
from .base import Lowering, Module, Shape, TunerType
from .config import ConfigKeys, TunerConfig
from .linear import EXCLUDES


class LnTuningConfigFile(TunerConfig):
    """The served keys of a config of LN tuning."""


class LnTuning(TunerType[LnTuningConfigFile]):
    """LN tuning."""

    peft_type = "LN_TUNING"
    effect = Effect.RAW
    computed = "the norm, with the adapter's weights, for its own rows"
    config = LnTuningConfigFile
    targets = (TargetNorm,)
    kinds = "norm"
    keys = ConfigKeys(EXCLUDES)

    def parts(self, config: LnTuningConfigFile) -> Mapping[str, str]:
        """The norm's own."""
        return {"weight": "ln_tuning_layers.weight", "bias": "ln_tuning_layers.bias"}

    def shapes(self, config: LnTuningConfigFile, module: Module) -> Mapping[str, Shape]:
        """`(K,)` each."""
        target = self._norm(module)
        return lowering.shapes(lowering.LnTuningSettings(target.has_bias), target.size)

    def lower(self, config: LnTuningConfigFile, module: Module, given: Lowering) -> AnyWeights:
        """The weights as stored."""
        target = self._norm(module)
        settings = lowering.LnTuningSettings(target.has_bias)
        return lowering.lower(given.tensors, settings, target.name, target.size)

    def _norm(self, module: Module) -> TargetNorm:
        assert isinstance(module.target, TargetNorm)
        return module.target
