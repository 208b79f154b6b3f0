"""BEFT: a bias for each targeted linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..lowering import beft as lowering
from ..lowering.base import Effect
from .base import Module
from .config import ConfigKeys, TunerConfig
from .linear import INITIALISATION, TARGETS, LinearTuner


class BeftConfigFile(TunerConfig):
    """The served keys of a BEFT config."""


class Beft(LinearTuner[BeftConfigFile]):
    """BEFT."""

    peft_type = "BEFT"
    effect = Effect.OUTPUT
    computed = "a shift of the output"
    config = BeftConfigFile
    arithmetic = lowering
    ends: ClassVar[Mapping[str, str]] = {"beft_bias": "beft_bias"}
    keys = ConfigKeys(TARGETS, INITIALISATION)

    def settings(self, config: BeftConfigFile, module: Module) -> lowering.BeftSettings:
        """None."""
        return lowering.BeftSettings()
