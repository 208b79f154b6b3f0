"""RoAd: pairs of outputs are rotated and scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from ..lowering import road as lowering
from ..lowering.base import Effect
from .base import Module
from .config import ConfigKeys, Rank, TunerConfig
from .linear import INITIALISATION, TARGETS, LinearTuner


class RoadConfigFile(TunerConfig):
    """The served keys of a RoAd config; PEFT writes both, and none is guessed."""

    variant: Literal["road_1", "road_2", "road_4"]
    group_size: Rank


class Road(LinearTuner[RoadConfigFile]):
    """RoAd."""

    peft_type = "ROAD"
    effect = Effect.OUTPUT
    computed = "a rotation of the output, pair by pair"
    config = RoadConfigFile
    arithmetic = lowering
    ends: ClassVar[Mapping[str, str]] = {"road_theta": "road_theta", "road_alpha": "road_alpha"}
    keys = ConfigKeys(
        TARGETS | {"variant", "group_size"},
        INITIALISATION,
        required=frozenset({"variant", "group_size"}),
    )

    def settings(self, config: RoadConfigFile, module: Module) -> lowering.RoadSettings:
        """The same for every module."""
        return lowering.RoadSettings(config.variant, config.group_size)
