"""LoHa and LoKr: products that LyCORIS brought, with one way to state rank and alpha."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from ..lowering import loha, lokr
from ..lowering.base import Effect
from ..patterns import EndPatterns
from .base import Module
from .config import ConfigKeys, Number, Numbers, Rank, Ranks, TunerConfig
from .linear import EXCLUDES, INITIALISATION, LAYERS, LinearTuner, in_training

_SERVED = EXCLUDES | LAYERS | {"r", "alpha", "rank_pattern", "alpha_pattern"}
_HARMLESS: Mapping[str, str] = {
    **INITIALISATION,
    **in_training("rank_dropout", "module_dropout"),
    "use_effective_conv2d": "of convolutions, which are not served",
}


class LoHaConfigFile(TunerConfig):
    """The served keys of a LoHa config; rank and alpha are never guessed."""

    r: Rank
    alpha: Number
    rank_pattern: Ranks = Field(default_factory=lambda: EndPatterns({}))
    alpha_pattern: Numbers = Field(default_factory=lambda: EndPatterns({}))


class LoKrConfigFile(LoHaConfigFile):
    """The served keys of a LoKr config."""

    decompose_both: bool = False
    decompose_factor: int = -1


class LoHa(LinearTuner[LoHaConfigFile]):
    """LoHa."""

    peft_type = "LOHA"
    effect = Effect.RAW
    computed = "a low-rank product of rank r * r where that is the cheaper, else a dense delta"
    config = LoHaConfigFile
    arithmetic = loha
    ends: ClassVar[Mapping[str, str]] = {
        name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    }
    keys = ConfigKeys(_SERVED, _HARMLESS, required=frozenset({"r", "alpha"}))

    def product_rank(self, config: LoHaConfigFile, module: Module) -> int:
        """Of the pairs of columns."""
        return self.settings(config, module).rank ** 2

    def settings(self, config: LoHaConfigFile, module: Module) -> loha.LoHaSettings:
        """Rank and alpha."""
        return loha.LoHaSettings(
            self.patterned(config.rank_pattern, config.r, module),
            self.patterned(config.alpha_pattern, config.alpha, module),
        )


class LoKr(LinearTuner[LoKrConfigFile]):
    """LoKr."""

    peft_type = "LOKR"
    effect = Effect.RAW
    computed = "a low-rank product where a factor is thin, else a dense delta"
    config = LoKrConfigFile
    arithmetic = lokr
    ends: ClassVar[Mapping[str, str]] = {
        name: name
        for name in (
            "lokr_w1",
            "lokr_w1_a",
            "lokr_w1_b",
            "lokr_w2",
            "lokr_w2_a",
            "lokr_w2_b",
        )
    }
    keys = ConfigKeys(
        _SERVED | {"decompose_both", "decompose_factor"},
        {**_HARMLESS, **in_training("rank_dropout_scale")},
        required=frozenset({"r", "alpha"}),
    )

    def product_rank(self, config: LoKrConfigFile, module: Module) -> int:
        """Of both factors, each a product itself or at most of its shorter side."""
        shapes = {part: header.shape for part, header in module.headers.items()}
        return math.prod(
            shape[1] if part.endswith("_a") else min(shape)
            for part, shape in shapes.items()
            if not part.endswith("_b")
        )

    def settings(self, config: LoKrConfigFile, module: Module) -> lokr.LoKrSettings:
        """Rank, alpha and the way the sizes are split."""
        return lokr.LoKrSettings(
            self.patterned(config.rank_pattern, config.r, module),
            self.patterned(config.alpha_pattern, config.alpha, module),
            config.decompose_both,
            config.decompose_factor,
        )
