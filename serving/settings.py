"""What the configuration models share: how they are checked, and fields that mean the same."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.errors import ConfigError

Percentile = Annotated[
    float,
    Field(
        gt=0.0,
        le=100.0,
        description="Share of input magnitudes (percent) that a static scale must cover.",
    ),
]
QuantizeHead = Annotated[bool, Field(description="Quantise the output head too.")]
Ignore = Annotated[
    tuple[str, ...],
    Field(description="Linears to leave unquantised: full names, * and ? match."),
]


class Settings(BaseModel):
    """A configuration model.  Field descriptions are the command line's help."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def checked(cls, **settings: object) -> Self:
        """Build from keywords.

        Raises:
            ConfigError: an unknown setting, or a value out of range.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or "settings"
            raise ConfigError(
                f"setting {name}={first.get('input')!r}",
                first["msg"],
                f"known settings: {', '.join(cls.model_fields)}",
            ) from error


def ignored_linears(names: Iterable[str], patterns: Iterable[str]) -> dict[str, str]:
    """Which of `names` an `Ignore` setting means, each with its entry.

    Raises:
        ConfigError: an entry that matches none.
    """
    names = tuple(names)
    ignored: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"ignore entry {pattern!r}", "matches no linear of the model", "correct it"
            )
        ignored |= dict.fromkeys(matched, pattern)
    return ignored
