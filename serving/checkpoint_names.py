"""Names of a checkpoint's tensors and names in the model, by transformers' own renaming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..core.errors import WrapError

_WEIGHT = ".weight"


@dataclass(frozen=True)
class CheckpointNames:
    """Where the checkpoint keeps the modules of the model.

    Attributes:
        stored: name in the model -> name in the checkpoint, of modules that both have.
        converted: modules of the model whose weight transformers makes of other tensors (by
            splitting or merging), which has no name of its own in the checkpoint.
    """

    stored: Mapping[str, str]
    converted: frozenset[str]

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
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    present = model.state_dict()
    prefix = model.base_model_prefix
    stored: dict[str, str] = {}
    converted = set()
    # Some of the rules remember what they have seen, in this order.
    for module in sorted({key.rpartition(".")[0] for key in keys}, key=dot_natural_key):
        key = module + _WEIGHT
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, present)
        if renamed not in present and key in present:
            renamed, pattern = rename_source_key(key, [], [], prefix, present)
        if renamed not in present:
            continue
        name = renamed.removesuffix(_WEIGHT)
        if pattern is not None:
            converted.add(name)
        elif name in stored:
            raise WrapError(
                f"module {name}",
                f"is in the checkpoint twice: as {stored[name]} and as {module}",
                "pass the checkpoint as its training saved it",
            )
        else:
            stored[name] = module
    return CheckpointNames(stored, frozenset(converted))


def tied_weight(model: PreTrainedModel, name: str) -> str | None:
    """Full name of the parameter that is this linear's weight too; None where nothing is."""
    tied = model.all_tied_weights_keys
    both_ways = (*tied.items(), *((b, a) for a, b in tied.items()))
    return next((other for one, other in both_ways if one == f"{name}{_WEIGHT}"), None)
