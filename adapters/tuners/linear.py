"""Types whose arithmetic is one function of a linear's tensors and a few settings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from ..lowering.base import BaseLinear
from ..weights import AnyWeights
from .base import Config, Lowering, Module, Shape, TunerType


class LinearTuner(TunerType[Config]):
    """A type on linears only.

    Attributes:
        arithmetic: its module of `adapters.lowering`, with `shapes` and `lower`.
        ends: what `parts` returns.
    """

    arithmetic: ClassVar[ModuleType]
    ends: ClassVar[Mapping[str, str]]

    @abstractmethod
    def settings(self, config: Config, module: Module) -> Any:
        """The settings of one module, after the patterns."""

    def parts(self, config: Config) -> Mapping[str, str]:
        """The same for every config."""
        return self.ends

    def shapes(self, config: Config, module: Module) -> Mapping[str, Shape]:
        """As the arithmetic expects them."""
        layer = module.linear
        base = BaseLinear(layer.name, layer.in_features, layer.out_features)
        return self.arithmetic.shapes(self.settings(config, module), base)

    def lower(self, config: Config, module: Module, given: Lowering) -> AnyWeights:
        """As the arithmetic lowers it."""
        settings = self.settings(config, module)
        return self.arithmetic.lower(given.tensors, settings, given.base_linear(module.linear))


# Keys of most types.
TARGETS = frozenset({"target_modules", "modules_to_save"})
EXCLUDES = TARGETS | {"exclude_modules"}
LAYERS = frozenset({"layers_to_transform", "layers_pattern"})
INITIALISATION: Mapping[str, str] = {"init_weights": "fills the tensors only"}
LAYOUT: Mapping[str, str] = {"fan_in_fan_out": "the layout of the base weight"}
BIAS = frozenset({"bias"})


def in_training(*keys: str) -> dict[str, str]:
    """Harmless keys that act in training only."""
    return dict.fromkeys(keys, "acts in training only")
