"""What the config of a PEFT type is made of: checked values, and keys by what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

from ..patterns import DottedPatterns, EndPatterns, check_expressions


def _framed(frame: str) -> Callable[[str | list[str]], str | list[str]]:
    def check(value: str | list[str]) -> str | list[str]:
        check_expressions([value] if isinstance(value, str) else value, frame)
        return value

    return check


def _end_patterns(entries: dict[str, Any], info: ValidationInfo) -> EndPatterns:
    return EndPatterns(entries, info.field_name or "")


def _dotted_patterns(entries: dict[str, Any], info: ValidationInfo) -> DottedPatterns:
    return DottedPatterns(entries, info.field_name or "")


def _finite(number: int | float) -> int | float:
    # Integers stay integers (PEFT divides them as such); beyond float they cannot be a scaling.
    if not abs(number) < 1e300:
        raise ValueError("must be a finite number")
    return number


Rank = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Annotated[int | float, AfterValidator(_finite)]
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
Regex = Annotated[str, AfterValidator(_framed("{}"))]
Ranks = Annotated[dict[str, Rank], AfterValidator(_end_patterns)]
Numbers = Annotated[dict[str, Number], AfterValidator(_end_patterns)]
DottedRanks = Annotated[dict[str, Rank], AfterValidator(_dotted_patterns)]
# The frames into which PEFT's check_target_module_exists sets them.
_LAYERS_FRAME = _framed(r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
LayersRegex = Annotated[list[str] | str, AfterValidator(_LAYERS_FRAME)]
SavedRegexes = Annotated[list[str], AfterValidator(_framed(r"(^|.*\.){}($|\..*)"))]


class TunerConfig(BaseModel):
    """The served keys that every PEFT type shares; those that it lacks keep their defaults."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    target_modules: list[str] | Regex | None = None
    exclude_modules: list[str] | Regex | None = None
    layers_to_transform: list[Index] | Index | None = None
    layers_pattern: LayersRegex | None = None
    modules_to_save: SavedRegexes | None = None
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
    def patterns(self) -> Mapping[str, EndPatterns]:
        """The names of modules that each key of patterns has entries for."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        return {key: value for key, value in values.items() if isinstance(value, EndPatterns)}


# In every config of PEFT, whatever its type.
COMMON_HARMLESS: Mapping[str, str] = {
    "auto_mapping": "names the base model's class",
    "base_model_name_or_path": "compared with the model that is served",
    "inference_mode": "whether PEFT freezes the tensors",
    "peft_version": "who wrote the file",
    "revision": "of the base model, compared for a note",
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
