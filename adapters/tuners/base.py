"""What a PEFT type states, so that its adapters can be read, checked and lowered.

A type states what its config and its tensors may hold; reading is one piece of code for all types
(`check.plan_load`, `assemble.assemble`).  The arithmetic is in `adapters.lowering`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import PeftType

from ..base import BaseFacts, BaseWeights, Target, TargetLayer
from ..findings import Finding
from ..lowering.base import BaseLinear, Effect
from ..patterns import EndPatterns, TextEnds
from ..tensor_file import TensorHeader
from ..weights import AnyWeights
from .config import ConfigKeys, TunerConfig

Shape = tuple[int, ...]
Config = TypeVar("Config", bound=TunerConfig)


@dataclass(frozen=True)
class Module:
    """One module of the base model with the tensors that an adapter has for it.

    Args:
        target: the base model's module.
        alias: the adapter's name of it: what the config's patterns were written for.
        headers: of its tensors, by the name of the part ("lora_A").
    """

    target: Target
    alias: str
    headers: Mapping[str, TensorHeader] = field(default_factory=dict)

    @property
    def linear(self) -> TargetLayer:
        """Its target, which must be a linear: all that `TunerType.targets` names by default."""
        assert isinstance(self.target, TargetLayer)
        return self.target


@dataclass(frozen=True, eq=False)
class Lowering:
    """What lowering one module may use.

    Args:
        tensors: of the module by part; for `TunerType.prepare` the shared ones.
        weights: of the base model; None where there is none at hand.
        max_rank: products of a higher rank become a dense change of the weight.
        modules: all that the adapter has tensors for, for what hangs on the widest one.
        prepared: what `TunerType.prepare` made of these.
    """

    tensors: Mapping[str, torch.Tensor]
    weights: BaseWeights | None
    max_rank: int
    modules: tuple[Module, ...] = ()
    prepared: Any = None

    def base_linear(self, layer: TargetLayer) -> BaseLinear:
        """The linear, with its weight and bias where the base is at hand."""
        weights = self.weights
        return BaseLinear(
            layer.name,
            layer.in_features,
            layer.out_features,
            None if weights is None else lambda: weights.weight(layer.name),
            weights.bias(layer.name) if weights is not None and layer.has_bias else None,
            self.max_rank,
        )


class TunerType(ABC, Generic[Config]):
    """One PEFT type.  One instance serves all adapters; it holds no state.

    Attributes:
        peft_type: as configs name it.
        effect: what a branch of it needs of the linear's input, at most.
        computed: how a linear computes it, for the documents.
        keys: what becomes of its config's keys.
        config: the class of its served keys.
        targets: the kinds of modules it may sit on.
        kinds: what those are called in messages.
        token_end: how the name of a tensor of trained token rows ends.
        selects_targets: whether it has tensors for each module that the config selects.
    """

    peft_type: ClassVar[str]
    effect: ClassVar[Effect]
    computed: ClassVar[str]
    keys: ClassVar[ConfigKeys]
    config: ClassVar[type[TunerConfig]]
    targets: ClassVar[tuple[type, ...]] = (TargetLayer,)
    kinds: ClassVar[str] = "linear"
    token_end: ClassVar[str] = "token_adapter.trainable_tokens_delta"
    selects_targets: ClassVar[bool] = True

    def check_config(self, raw: Mapping[str, Any]) -> list[Finding]:
        """Findings about values that need more than a type; nothing by default."""
        return []

    @abstractmethod
    def parts(self, config: Config) -> Mapping[str, str]:
        """Parts of a module to the ends of their tensors' names ("lora_A" -> "lora_A.weight")."""

    def shared(self, config: Config) -> tuple[str, ...]:
        """Names of tensors that belong to no module."""
        return ()

    def shared_shapes(self, config: Config, modules: Iterable[Module]) -> Mapping[str, Shape]:
        """Least shapes of the shared tensors; a file may hold larger ones."""
        return {}

    @abstractmethod
    def shapes(self, config: Config, module: Module) -> Mapping[str, Shape]:
        """The shape that every part of a module must have.

        Args:
            config: of the adapter.
            module: its headers tell which of several forms was stored.
        """

    def dimensions(self, part: str) -> tuple[str, ...] | None:
        """What the sizes of a part are ("rank", "inputs", "outputs"); None: as a whole."""
        return None

    def patterned(self, patterns: Mapping[str, Any], default: Any, module: Module) -> Any:
        """The value that a pattern gives a module; the patterns are those of a checked config."""
        assert isinstance(patterns, EndPatterns)
        return patterns.get(patterns.key_of(module.alias), default)

    def settings(self, config: Config, module: Module) -> Any:
        """The settings of one module, after the patterns; None where there are none."""
        return None

    def prepare(self, config: Config, given: Lowering) -> Any:
        """What all modules share, made once; becomes `Lowering.prepared`."""
        return None

    def rank(self, config: Config, module: Module) -> int:
        """Of the low-rank part that a module is lowered to for certain; 0 where none is."""
        return 0

    def product_rank(self, config: Config, module: Module) -> int:
        """Of the product that a module is where slots hold it, and a dense change where none does.

        0 where the choice does not hang on the slots.
        """
        return 0

    def invocation(self, config: Config) -> tuple[int, ...]:
        """Token ids, from whose last occurrence on it acts; empty: on every token."""
        return ()

    def needs_base(self, config: Config) -> str | None:
        """The feature that takes the base's weights to lower; None if none does."""
        return None

    def sizes(self, config: Config, headers: Mapping[str, TensorHeader]) -> tuple[int, int] | None:
        """K and N of a linear as its tensors tell them, 0 for one that nothing hangs on.

        None where they tell too little to lower without the base model.
        """
        return None

    def default_targets(self, base: BaseFacts) -> Iterable[str] | str | None:
        """What PEFT targets where `target_modules` is null; None if it has no default."""
        tuner = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(self.peft_type)]
        return getattr(tuner, "target_module_mapping", {}).get(base.model_type)

    def resolved(self, config: Config, base: BaseFacts) -> tuple[Config, list[Finding]]:
        """With PEFT's defaults that go by the model's type, and findings where it has none."""
        return config, []

    def token_rows(
        self, config: Config, base: BaseFacts, aliases: Mapping[str, str]
    ) -> dict[str, tuple[int, ...]]:
        """Modules to the tokens whose rows are trained.

        Args:
            config: of the adapter.
            base: the model; where the config names no module, its input embedding is meant.
            aliases: the adapter's names of the embeddings and linears, to the model's.

        Returns:
            By the model's name; an entry that names no module of it stays as it is.
        """
        rows = config.trainable_token_indices
        if rows is None:
            return {}
        if not isinstance(rows, dict):
            return {base.input_embedding or "embed_tokens": tuple(rows)}
        # By the end of the name's text, as PEFT does it, not by its dotted parts.
        ends = TextEnds(rows)
        named: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            for entry in ends.of(alias):
                named.setdefault(entry, []).append(name)
        found = {}
        for entry, ids in rows.items():
            found.update(dict.fromkeys(named.get(entry) or [entry], tuple(ids)))
        return found

    @abstractmethod
    def lower(self, config: Config, module: Module, given: Lowering) -> AnyWeights:
        """The parts that a module of the base computes with.

        Raises:
            AdapterError: what the headers could not tell speaks against it.
        """
