"""(IA)3: one vector for each targeted linear, of its output or, in a feed-forward, of its input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Self

from peft.utils.constants import (
    TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
    TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
)
from pydantic import model_validator

from ..base import BaseFacts
from ..findings import Finding, unsupported
from ..lowering import ia3 as lowering
from ..lowering.base import BaseLinear, Effect, Shapes
from ..patterns import TextEnds, WholePattern
from ..tensor_file import TensorHeader
from ..weights import AnyWeights
from .base import Lowering, Module, TunerType
from .config import ConfigKeys, Regex, TunerConfig


class Ia3ConfigFile(TunerConfig):
    """The served keys of an IA3 config."""

    feedforward_modules: list[str] | Regex | None = None

    @model_validator(mode="after")
    def _check_subset(self) -> Self:
        # PEFT refuses the same, by the names alone.
        targets, inner = self.target_modules, self.feedforward_modules
        if isinstance(targets, list) and isinstance(inner, list):
            extra = sorted(set(inner) - set(targets))
            if extra:
                raise ValueError(f"feedforward_modules names {extra[0]!r}, which is no target")
        return self

    def is_feedforward(self, alias: str) -> bool:
        """Whether a module's input is scaled, not its output.

        Args:
            alias: the adapter's name of the module.

        Raises:
            AdapterUnsupportedError: a regular expression takes too long.
        """
        names = self._named
        return names.matches(alias) if isinstance(names, WholePattern) else bool(names.of(alias))

    @cached_property
    def _named(self) -> WholePattern | TextEnds:
        names = self.feedforward_modules
        if isinstance(names, str):
            return WholePattern(names, "feedforward_modules")
        # By the end of the name's text, as PEFT does it, not by its dotted parts.
        return TextEnds(names or ())


class Ia3(TunerType[Ia3ConfigFile]):
    """IA3."""

    peft_type = "IA3"
    effect = Effect.INPUT
    computed = "a gain of the output; in feed-forward modules a scale of the input"
    config = Ia3ConfigFile
    keys = ConfigKeys(
        served=frozenset(
            {"feedforward_modules", "target_modules", "exclude_modules", "modules_to_save", "bias"}
        ),
        harmless={
            "fan_in_fan_out": "the layout of the base weight",
            "init_ia3_weights": "fills the vectors only",
            # LoRA's keys, which files made by hand carry along; IA3 has no such setting.
            "lora_alpha": "no key of IA3",
            "lora_dropout": "no key of IA3",
            "r": "no key of IA3",
        },
        optional_none=frozenset({"bias"}),
    )

    def parts(self, config: Ia3ConfigFile) -> Mapping[str, str]:
        """The vector."""
        return {"ia3_l": "ia3_l"}

    def shapes(self, config: Ia3ConfigFile, module: Module) -> Shapes:
        """`(1, K)` in a feed-forward module, else `(N, 1)`."""
        layer = module.linear
        base = BaseLinear(layer.name, layer.in_features, layer.out_features)
        return lowering.shapes(self._settings(config, module), base)

    def dimensions(self, part: str) -> tuple[str, ...] | None:
        """None: which size is the layer's hangs on the module."""
        return None

    def sizes(
        self, config: Ia3ConfigFile, headers: Mapping[str, TensorHeader]
    ) -> tuple[int, int] | None:
        """The one that the vector has."""
        shape = headers["ia3_l"].shape
        return (shape[1], shape[0]) if len(shape) == 2 else (0, 0)

    def default_targets(self, base: BaseFacts) -> Iterable[str] | str | None:
        """PEFT's table."""
        return TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.get(base.model_type)

    def resolved(
        self, config: Ia3ConfigFile, base: BaseFacts
    ) -> tuple[Ia3ConfigFile, list[Finding]]:
        """With PEFT's default for `feedforward_modules`, where it is null."""
        if config.feedforward_modules is not None:
            return config, []
        names = TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(base.model_type)
        if names is None:
            kind = base.model_type
            text = (
                f"feedforward_modules is null and PEFT has no default for models of type {kind!r}"
            )
            remedy = "name the feed-forward modules, or [], in adapter_config.json"
            return config, [unsupported(text, remedy)]
        return config.model_copy(update={"feedforward_modules": list(names)}), []

    def lower(self, config: Ia3ConfigFile, module: Module, given: Lowering) -> AnyWeights:
        """A gain, or in a feed-forward module an input scale."""
        settings = self._settings(config, module)
        return lowering.lower(given.tensors, settings, given.base_linear(module.linear))

    def _settings(self, config: Ia3ConfigFile, module: Module) -> lowering.Ia3Settings:
        return lowering.Ia3Settings(config.is_feedforward(module.alias))
