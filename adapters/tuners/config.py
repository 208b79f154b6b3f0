"""What the config of a PEFT type is made of: checked values, and keys by what becomes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _whole_pattern(pattern: str) -> str:
    _compile(pattern, pattern)
    return pattern


def _ending_pattern(pattern: str) -> str:
    # The frame into which PEFT's get_pattern_key sets it.
    _compile(pattern, rf"(.*\.)?({pattern})$")
    return pattern


def _list_pattern(pattern: str) -> str:
    # The frame into which PEFT's check_target_module_exists sets layers_pattern.
    _compile(pattern, rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.")
    return pattern


def _saved_pattern(pattern: str) -> str:
    # The frame into which PEFT's check_target_module_exists sets modules_to_save.
    _compile(pattern, rf"(^|.*\.){pattern}($|\..*)")
    return pattern


def _compile(pattern: str, framed: str) -> None:
    try:
        re.compile(framed)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def _finite(number: int | float) -> int | float:
    # Integers stay integers (PEFT divides them as such); beyond float they cannot be a scaling.
    if not abs(number) < 1e300:
        raise ValueError("must be a finite number")
    return number


Rank = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Annotated[int | float, AfterValidator(_finite)]
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
Regex = Annotated[str, AfterValidator(_whole_pattern)]
EndRegex = Annotated[str, AfterValidator(_ending_pattern)]
ListRegex = Annotated[str, AfterValidator(_list_pattern)]
SavedRegex = Annotated[str, AfterValidator(_saved_pattern)]


class TunerConfig(BaseModel):
    """The served keys that every PEFT type shares; those that it lacks keep their defaults."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    target_modules: list[str] | Regex | None = None
    exclude_modules: list[str] | Regex | None = None
    layers_to_transform: list[Index] | Index | None = None
    layers_pattern: list[ListRegex] | ListRegex | None = None
    modules_to_save: list[SavedRegex] | None = None
    trainable_token_indices: list[Index] | dict[str, list[Index]] | None = None
    task_type: str | None = None

    @model_validator(mode="after")
    def _check_layer_selection(self) -> Self:
        # PEFT refuses the same combinations.
        if isinstance(self.target_modules, str):
            for key in ("layers_to_transform", "layers_pattern"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} cannot go with target_modules as one string")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern needs layers_to_transform")
        return self

    @property
    def patterns(self) -> Mapping[str, tuple[str, ...]]:
        """The names of modules that each key of patterns has entries for."""
        found = {}
        for key in type(self).model_fields:
            value = getattr(self, key)
            if key.endswith("_pattern") and isinstance(value, dict):
                found[key] = tuple(value)
        return found


# In every config of PEFT, whatever its type.
COMMON_HARMLESS: Mapping[str, str] = {
    "auto_mapping": "names the base model's class",
    "base_model_name_or_path": "a name, compared with the model's for a note",
    "inference_mode": "whether PEFT freezes the tensors",
    "peft_version": "who wrote the file",
    "revision": "of the base model",
}
COMMON_SERVED = frozenset({"peft_type", "task_type"})


@dataclass(frozen=True)
class ConfigKeys:
    """What becomes of a type's keys, beside `COMMON_SERVED` and `COMMON_HARMLESS`.

    A key that stands in no table is refused unless it is off: a newer PEFT may have given it a
    meaning that changes the result.

    Args:
        served: keys that are read.
        harmless: keys that change nothing in what saved tensors mean, with the reason.
        refused: keys that must be off (null, false or empty), with the name of the feature.
        required: served keys that every PEFT version writes and that are never guessed.
        optional_none: served keys that must be "none" or null ("bias").
    """

    served: frozenset[str]
    harmless: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    optional_none: frozenset[str] = frozenset()

    @property
    def all_served(self) -> frozenset[str]:
        """With those that every type shares."""
        return self.served | COMMON_SERVED

    @property
    def all_harmless(self) -> Mapping[str, str]:
        """With those that every type shares."""
        return {**COMMON_HARMLESS, **self.harmless}
