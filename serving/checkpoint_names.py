"""Names of a checkpoint's tensors and names in the model, by transformers' own renaming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..core.errors import WrapError

_WEIGHT = ".weight"


@dataclass(frozen=True)
class MergedWeight:
    """A parameter of the model that transformers makes of other tensors.

    Attributes:
        sources: by the converter's patterns, in the converter's order, the modules of the
            checkpoint whose weights it takes; empty where there are none.
        operations: what it does with them, one after the other.
    """

    sources: dict[str, list[str]]
    operations: Sequence[ConversionOps]


@dataclass(frozen=True)
class CheckpointNames:
    """Where the checkpoint keeps the modules of the model.

    Attributes:
        stored: name in the model -> name in the checkpoint, of modules that both have.
        converted: modules of the model whose weight transformers makes of other tensors (by
            splitting or merging), which has no name of its own in the checkpoint.
        merged: the same by full name of the parameter, with those tensors.
        whole: full name of a parameter in the model -> full name in the checkpoint, where it is no
            module's weight.
        unplaced: modules of the checkpoint that have no weight in the model -> the name they would
            have there.
    """

    stored: Mapping[str, str]
    converted: frozenset[str]
    merged: Mapping[str, MergedWeight] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    unplaced: Mapping[str, str] = field(default_factory=dict)

    def in_model(self) -> dict[str, str]:
        """Name in the checkpoint -> name in the model."""
        return {theirs: ours for ours, theirs in self.stored.items()}


def checkpoint_names(model: PreTrainedModel, keys: Iterable[str]) -> CheckpointNames:
    """Find every module of `keys` in the model, whose tensors may lie on the meta device.

    Quantised modules count as if they had a `weight`, whatever their tensors are called: that is
    the name which transformers' rules are written for.

    Args:
        model: not quantised.
        keys: full names of the checkpoint's tensors.

    Raises:
        WrapError: two modules of the checkpoint are one of the model.
    """
    search = _Search(model)
    modules: dict[str, list[str]] = {}
    for key in keys:
        module, _, part = key.rpartition(".")
        modules.setdefault(module, []).append(part)
    # Some of the rules remember what they have seen, in this order.
    for module in sorted(modules, key=dot_natural_key):
        search.place(module, modules[module])
    return CheckpointNames(
        search.stored,
        frozenset(name.removesuffix(_WEIGHT) for name in search.merged),
        search.merged,
        search.whole,
        search.unplaced,
    )


class _Search:
    """One run of `checkpoint_names`."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._by_pattern = {p: rule for rule in self._converters for p in rule.source_patterns}
        self._present = model.state_dict()
        self._prefix = model.base_model_prefix
        self.stored: dict[str, str] = {}
        self.merged: dict[str, MergedWeight] = {}
        self.whole: dict[str, str] = {}
        self.unplaced: dict[str, str] = {}

    def place(self, module: str, parts: Sequence[str]) -> None:
        """Find a module of the checkpoint, which has tensors of these last names."""
        renamed, pattern = self._renamed(module + _WEIGHT)
        if renamed not in self._present:
            self.unplaced[module] = renamed.removesuffix(_WEIGHT)
            for part in parts:
                key = f"{module}.{part}" if module else part
                name, pattern = self._renamed(key)
                if name in self._present and pattern is None:
                    self.whole[name] = key
            return
        name = renamed.removesuffix(_WEIGHT)
        if pattern is not None:
            self._merge(renamed, pattern, module)
        elif name in self.stored:
            raise WrapError(
                f"module {name}",
                f"is in the checkpoint twice: as {self.stored[name]} and as {module}",
                "pass the checkpoint as its training saved it",
            )
        else:
            self.stored[name] = module

    def _renamed(self, key: str) -> tuple[str, str | None]:
        rules = (self._renamings, self._converters, self._prefix, self._present)
        renamed, pattern = rename_source_key(key, *rules)
        if renamed not in self._present and key in self._present:
            return rename_source_key(key, [], [], self._prefix, self._present)
        return renamed, pattern

    def _merge(self, parameter: str, pattern: str, module: str) -> None:
        rule = self._by_pattern[pattern]
        if parameter not in self.merged:
            sources: dict[str, list[str]] = {p: [] for p in rule.source_patterns}
            self.merged[parameter] = MergedWeight(sources, rule.operations)
        self.merged[parameter].sources.setdefault(pattern, []).append(module)


def tied_weight(model: PreTrainedModel, name: str) -> str | None:
    """Full name of the parameter that is this linear's weight too; None where nothing is."""
    tied = model.all_tied_weights_keys
    both_ways = (*tied.items(), *((b, a) for a, b in tied.items()))
    return next((other for one, other in both_ways if one == f"{name}{_WEIGHT}"), None)
