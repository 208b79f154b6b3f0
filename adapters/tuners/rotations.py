"""OFT and BOFT: the input is rotated before the base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..lowering import boft, oft
from ..lowering.base import Effect
from .base import Module
from .config import ConfigKeys, Count, Number, TunerConfig
from .linear import BIAS, EXCLUDES, INITIALISATION, LAYERS, LAYOUT, LinearTuner, in_training


class OftConfigFile(TunerConfig):
    """The served keys of an OFT config; PEFT writes all of them, and none is guessed."""

    r: Count
    oft_block_size: Count
    coft: bool = False
    eps: Number = 6e-5
    block_share: bool = False
    use_cayley_neumann: bool
    num_cayley_neumann_terms: Count = 5


class Oft(LinearTuner[OftConfigFile]):
    """OFT."""

    peft_type = "OFT"
    effect = Effect.INPUT
    computed = "a rotation of the input, block by block"
    config = OftConfigFile
    arithmetic = oft
    ends: ClassVar[Mapping[str, str]] = {"oft_R": "oft_R.weight"}
    keys = ConfigKeys(
        EXCLUDES
        | LAYERS
        | BIAS
        | {
            "r",
            "oft_block_size",
            "coft",
            "eps",
            "block_share",
            "use_cayley_neumann",
            "num_cayley_neumann_terms",
        },
        {**INITIALISATION, **LAYOUT, **in_training("module_dropout")},
        # Older ones left these out, and meant another layout of the blocks.
        required=frozenset({"r", "oft_block_size", "use_cayley_neumann"}),
        optional_none=BIAS,
    )

    def settings(self, config: OftConfigFile, module: Module) -> oft.OftSettings:
        """The same for every module."""
        return oft.OftSettings(
            config.r,
            config.oft_block_size,
            config.coft,
            config.eps,
            config.block_share,
            config.use_cayley_neumann,
            config.num_cayley_neumann_terms,
        )


class BoftConfigFile(TunerConfig):
    """The served keys of a BOFT config."""

    boft_block_size: Count
    boft_block_num: Count


class Boft(LinearTuner[BoftConfigFile]):
    """BOFT."""

    peft_type = "BOFT"
    effect = Effect.INPUT
    computed = "rotations of the input one after the other, and a gain"
    config = BoftConfigFile
    arithmetic = boft
    ends: ClassVar[Mapping[str, str]] = {"boft_R": "boft_R", "boft_s": "boft_s"}
    keys = ConfigKeys(
        EXCLUDES | LAYERS | BIAS | {"boft_block_size", "boft_block_num"},
        {
            **INITIALISATION,
            **LAYOUT,
            **in_training("boft_dropout"),
            "boft_n_butterfly_factor": "the stored tensor says how many factors there are",
        },
        required=frozenset({"boft_block_size", "boft_block_num"}),
        optional_none=BIAS,
    )

    def settings(self, config: BoftConfigFile, module: Module) -> boft.BoftSettings:
        """The blocks, and as many factors as are stored."""
        stored = module.headers["boft_R"].shape if "boft_R" in module.headers else ()
        factors = max(stored[0], 1) if stored else 1
        return boft.BoftSettings(config.boft_block_size, config.boft_block_num, factors)
