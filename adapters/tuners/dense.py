"""FourierFT, C3A and HiRA: few numbers, and a change of the weight that is dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from ..lowering import c3a, fourierft, hira
from ..lowering.base import Effect
from ..patterns import DottedPatterns, EndPatterns
from .base import Module
from .config import ConfigKeys, DottedRanks, Number, Rank, Ranks, TunerConfig
from .linear import (
    BIAS,
    EXCLUDES,
    INITIALISATION,
    LAYERS,
    LAYOUT,
    TARGETS,
    LinearTuner,
    in_training,
)


class FourierFTConfigFile(TunerConfig):
    """The served keys of a FourierFT config; none of the numbers is guessed."""

    n_frequency: Rank
    scaling: Number
    random_loc_seed: int
    n_frequency_pattern: DottedRanks = Field(default_factory=lambda: DottedPatterns({}))


class FourierFT(LinearTuner[FourierFTConfigFile]):
    """FourierFT."""

    peft_type = "FOURIERFT"
    effect = Effect.RAW
    computed = "a dense delta"
    config = FourierFTConfigFile
    arithmetic = fourierft
    ends: ClassVar[Mapping[str, str]] = {"fourierft_spectrum": "fourierft_spectrum"}
    keys = ConfigKeys(
        EXCLUDES
        | LAYERS
        | BIAS
        | {"n_frequency", "scaling", "random_loc_seed", "n_frequency_pattern"},
        {**INITIALISATION, **LAYOUT},
        required=frozenset({"n_frequency", "scaling", "random_loc_seed"}),
        optional_none=BIAS,
    )

    def settings(self, config: FourierFTConfigFile, module: Module) -> fourierft.FourierFTSettings:
        """How many coefficients, and where."""
        count = self.patterned(config.n_frequency_pattern, config.n_frequency, module)
        return fourierft.FourierFTSettings(count, config.scaling, config.random_loc_seed)


class C3aConfigFile(TunerConfig):
    """The served keys of a C3A config."""

    block_size: Rank
    block_size_pattern: DottedRanks = Field(default_factory=lambda: DottedPatterns({}))


class C3a(LinearTuner[C3aConfigFile]):
    """C3A."""

    peft_type = "C3A"
    effect = Effect.RAW
    computed = "a dense delta"
    config = C3aConfigFile
    arithmetic = c3a
    ends: ClassVar[Mapping[str, str]] = {"c3a_kernel": "c3a_kernel"}
    keys = ConfigKeys(
        TARGETS | LAYERS | BIAS | {"block_size", "block_size_pattern"},
        INITIALISATION,
        required=frozenset({"block_size"}),
        optional_none=BIAS,
    )

    def settings(self, config: C3aConfigFile, module: Module) -> c3a.C3aSettings:
        """The block size."""
        size = self.patterned(config.block_size_pattern, config.block_size, module)
        return c3a.C3aSettings(size)


class HiraConfigFile(TunerConfig):
    """The served keys of a HiRA config."""

    r: Rank
    rank_pattern: Ranks = Field(default_factory=lambda: EndPatterns({}))


class Hira(LinearTuner[HiraConfigFile]):
    """HiRA."""

    peft_type = "HIRA"
    effect = Effect.RAW
    computed = "a dense delta, made with the base's weight"
    config = HiraConfigFile
    arithmetic = hira
    ends: ClassVar[Mapping[str, str]] = {"hira_A": "hira_A", "hira_B": "hira_B"}
    keys = ConfigKeys(
        EXCLUDES | LAYERS | {"r", "rank_pattern"},
        {**INITIALISATION, **LAYOUT, **in_training("hira_dropout")},
        required=frozenset({"r"}),
    )

    def needs_base(self, config: HiraConfigFile) -> str | None:
        """It scales the base's weight number by number."""
        return "HiRA"

    def settings(self, config: HiraConfigFile, module: Module) -> hira.HiraSettings:
        """The rank."""
        stored = module.headers["hira_A"].shape[:1] if "hira_A" in module.headers else ()
        if stored == (config.r,):
            # PEFT 0.21 makes modules of this rank whatever the pattern says.
            return hira.HiraSettings(config.r)
        return hira.HiraSettings(self.patterned(config.rank_pattern, config.r, module))
