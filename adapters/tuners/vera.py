"""VeRA: two random matrices that all modules share, two trained vectors for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch

from ..lowering import vera as lowering
from ..lowering.base import Effect
from ..weights import AnyWeights
from .base import Lowering, Module, Shape
from .config import ConfigKeys, Rank, TunerConfig
from .linear import BIAS, INITIALISATION, LAYERS, LAYOUT, TARGETS, LinearTuner, in_training

_NONE = lowering.VeraProjections(torch.empty(0, 0), torch.empty(0, 0))


class VeraConfigFile(TunerConfig):
    """The served keys of a VeRA config."""

    r: Rank
    projection_prng_key: int | None = None
    save_projection: bool = True


class Vera(LinearTuner[VeraConfigFile]):
    """VeRA."""

    peft_type = "VERA"
    effect = Effect.RAW
    computed = "a low-rank product, the vectors folded in; of a rank above all slots, a dense delta"
    config = VeraConfigFile
    arithmetic = lowering
    ends: ClassVar[Mapping[str, str]] = {
        "vera_lambda_b": "vera_lambda_b",
        "vera_lambda_d": "vera_lambda_d",
    }
    keys = ConfigKeys(
        served=TARGETS | LAYERS | BIAS | {"r", "projection_prng_key", "save_projection"},
        harmless={
            **INITIALISATION,
            **LAYOUT,
            **in_training("vera_dropout"),
            "d_initial": "fills a vector only",
        },
        required=frozenset({"r"}),
        optional_none=BIAS,
    )

    def shared(self, config: VeraConfigFile) -> tuple[str, ...]:
        """The matrices, where they were saved."""
        return ("vera_A", "vera_B") if config.save_projection else ()

    def shared_shapes(
        self, config: VeraConfigFile, modules: Iterable[Module]
    ) -> Mapping[str, Shape]:
        """As wide as the widest module."""
        if not config.save_projection:
            return {}
        inputs, outputs = _widest(modules)
        return {"vera_A": (config.r, inputs), "vera_B": (outputs, config.r)}

    def prepare(self, config: VeraConfigFile, given: Lowering) -> lowering.VeraProjections:
        """The matrices, as saved or as drawn again."""
        if config.save_projection:
            return lowering.VeraProjections(given.tensors["vera_A"], given.tensors["vera_B"])
        inputs, outputs = _widest(given.modules)
        return lowering.regenerate(config.projection_prng_key or 0, config.r, inputs, outputs)

    def settings(self, config: VeraConfigFile, module: Module) -> lowering.VeraSettings:
        """Without the matrices, which no shape hangs on."""
        return lowering.VeraSettings(config.r, _NONE)

    def product_rank(self, config: VeraConfigFile, module: Module) -> int:
        """Of the shared matrices."""
        return config.r

    def lower(self, config: VeraConfigFile, module: Module, given: Lowering) -> AnyWeights:
        """A product, or what it comes to."""
        settings = lowering.VeraSettings(config.r, given.prepared)
        return lowering.lower(given.tensors, settings, given.base_linear(module.linear))


def _widest(modules: Iterable[Module]) -> tuple[int, int]:
    layers = [module.linear for module in modules]
    return max(layer.in_features for layer in layers), max(layer.out_features for layer in layers)
