"""AdaLoRA, MiSS and DeLoRA: other ways to state a low-rank product."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from ..findings import Finding, unsupported
from ..lowering import adalora, delora, miss
from ..lowering.base import Effect
from ..patterns import EndPatterns
from .base import Module
from .config import ConfigKeys, Number, Rank, Ranks, TunerConfig
from .linear import BIAS, EXCLUDES, INITIALISATION, LAYERS, LinearTuner, in_training
from .lora import Lora

_MASK = re.compile(r"(?P<module>.+)\.lora_E(?:\.[^.]+)?")


def rank_masks(pattern: Mapping[str, list[bool]]) -> dict[str, list[bool]]:
    """The masks of a `rank_pattern` by the name of the module; its keys are names of lora_E."""
    return {
        match["module"] if (match := _MASK.fullmatch(name)) else name: mask
        for name, mask in pattern.items()
    }


class AdaLoraConfigFile(TunerConfig):
    """The served keys of an AdaLoRA config.

    `rank_pattern` holds a mask of `init_r` places for each module: those that training kept.
    """

    init_r: Rank
    lora_alpha: Number
    rank_pattern: dict[str, list[bool]] = Field(default_factory=dict)

    @cached_property
    def masks(self) -> Mapping[str, list[bool]]:
        """By the adapter's name of the module."""
        return rank_masks(self.rank_pattern)

    @property
    def patterns(self) -> Mapping[str, EndPatterns]:
        """Names of modules, as patterns that match nothing else."""
        masks = {re.escape(name): mask for name, mask in self.masks.items()}
        return {"rank_pattern": EndPatterns(masks, "rank_pattern")}


# Keys that AdaLoRA has from LoRA and does not read, or refuses itself.
_OF_LORA = Lora.keys
_UNREAD = {
    "alora_invocation_tokens": "activated LoRA",
    "alpha_pattern": "a pattern of alphas",
    "lora_bias": "a bias on lora_B",
    "target_parameters": "branches on parameters",
    "trainable_token_indices": "trained tokens",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_rslora": "rsLoRA",
}


class AdaLora(LinearTuner[AdaLoraConfigFile]):
    """AdaLoRA."""

    peft_type = "ADALORA"
    effect = Effect.RAW
    computed = "a low-rank product, the singular values folded into A"
    config = AdaLoraConfigFile
    arithmetic = adalora
    ends: ClassVar[Mapping[str, str]] = {name: name for name in ("lora_A", "lora_B", "lora_E")}
    keys = ConfigKeys(
        EXCLUDES | LAYERS | BIAS | {"init_r", "lora_alpha", "rank_pattern"},
        {
            **_OF_LORA.harmless,
            **in_training(
                "beta1", "beta2", "deltaT", "orth_reg_weight", "target_r", "tfinal", "tinit",
                "total_step",
            ),
            "r": "AdaLoRA begins with init_r",
        },
        {**_OF_LORA.refused, **_UNREAD},
        required=frozenset({"init_r", "lora_alpha"}),
        optional_none=BIAS,
    )  # fmt: skip

    def check_config(self, raw: Mapping[str, Any]) -> list[Finding]:
        """The same initialisations as of LoRA."""
        return Lora().check_config({"init_lora_weights": raw.get("init_lora_weights")})

    def rank(self, config: AdaLoraConfigFile, module: Module) -> int:
        """As many as its mask keeps."""
        mask = config.masks.get(module.alias)
        return config.init_r if mask is None else sum(mask)

    def settings(self, config: AdaLoraConfigFile, module: Module) -> adalora.AdaLoraSettings:
        """The rank that was left, and the one at the beginning."""
        return adalora.AdaLoraSettings(self.rank(config, module), config.init_r, config.lora_alpha)


class MissConfigFile(TunerConfig):
    """The served keys of a MiSS config; `init_weights` chooses the variant."""

    r: Rank
    mini_r: Rank = 1
    init_weights: bool | Literal["bat", "mini"] = True


class Miss(LinearTuner[MissConfigFile]):
    """MiSS."""

    peft_type = "MISS"
    effect = Effect.RAW
    computed = "a low-rank product whose A only adds"
    config = MissConfigFile
    arithmetic = miss
    ends: ClassVar[Mapping[str, str]] = {"miss_block": "miss_block"}
    keys = ConfigKeys(
        EXCLUDES | LAYERS | BIAS | {"r", "mini_r", "init_weights"},
        in_training("miss_dropout"),
        required=frozenset({"r"}),
        optional_none=BIAS,
    )

    def check_config(self, raw: Mapping[str, Any]) -> list[Finding]:
        """Of the variants, one multiplies with the changed weight in the base's place."""
        if raw.get("init_weights") != "bat":
            return []
        text = "MiSS with init_weights='bat' multiplies with the changed weight in the base's place"
        return [unsupported(text, "train it with init_weights true or 'mini'")]

    def rank(self, config: MissConfigFile, module: Module) -> int:
        """Of the sums."""
        return config.r

    def settings(self, config: MissConfigFile, module: Module) -> miss.MissSettings:
        """The variant, with its sizes."""
        variant = config.init_weights if isinstance(config.init_weights, str) else "miss"
        named = cast(Literal["miss", "mini", "bat"], variant)
        return miss.MissSettings(config.r, named, config.mini_r)


class DeloraConfigFile(TunerConfig):
    """The served keys of a DeLoRA config."""

    r: Rank
    rank_pattern: Ranks = Field(default_factory=lambda: EndPatterns({}))


class Delora(LinearTuner[DeloraConfigFile]):
    """DeLoRA."""

    peft_type = "DELORA"
    effect = Effect.RAW
    computed = "a low-rank product, strength and norms folded into it"
    config = DeloraConfigFile
    arithmetic = delora
    ends: ClassVar[Mapping[str, str]] = {
        name: name for name in ("delora_A", "delora_B", "delora_lambda", "delora_w_norm")
    }
    keys = ConfigKeys(
        EXCLUDES | LAYERS | BIAS | {"r", "rank_pattern"},
        {
            **INITIALISATION,
            **in_training("module_dropout"),
            "delora_lambda": "fills a tensor only",
            "lambda_pattern": "fills tensors only",
        },
        required=frozenset({"r"}),
        optional_none=BIAS,
    )

    def rank(self, config: DeloraConfigFile, module: Module) -> int:
        """After the pattern."""
        return self.patterned(config.rank_pattern, config.r, module)

    def settings(self, config: DeloraConfigFile, module: Module) -> delora.DeloraSettings:
        """The rank."""
        return delora.DeloraSettings(self.rank(config, module))
