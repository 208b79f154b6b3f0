"""Policies by name: our own, and those of installed distributions (group `branchline.policies`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..core.errors import ConfigError
from .auto import AutoPolicy
from .base import Policy
from .own import AbsorbedPolicy, DualPolicy, DynamicPolicy, StaticPolicy

#: The group of entry points that names policies.
GROUP = "branchline.policies"
_OWN: Mapping[str, type[Policy]] = MappingProxyType(
    {cls.name: cls for cls in (AbsorbedPolicy, AutoPolicy, DualPolicy, DynamicPolicy, StaticPolicy)}
)


@dataclass(frozen=True)
class _Written:
    """A policy as it is written: ``name`` or ``name:key=value,...``."""

    text: str
    name: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> _Written:
        name, colon, rest = text.partition(":")
        options: dict[str, str] = {}
        for part in rest.split(",") if colon else ():
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not (key and equals and value):
                raise ConfigError(
                    f"policy {text!r}", f"{part!r} is no key=value", "write name:key=value,..."
                )
            if key in options:
                raise ConfigError(f"policy {text!r}", f"sets {key} twice", "set it once")
            options[key] = value
        return cls(text, name, options)


def policy_names() -> tuple[str, ...]:
    """All that `make_policy` would look for, sorted; those of plug-ins are not loaded for it."""
    return tuple(sorted({*_OWN, *(point.name for point in entry_points(group=GROUP))}))


def make_policy(text: str) -> Policy:
    """The policy that `text` names, with its options.

    Args:
        text: ``name`` or ``name:key=value,...``.

    Raises:
        ConfigError: there is none of that name, or more than one; its plug-in is broken; or an
            option is unknown or refused.
    """
    written = _Written.parse(text)
    return _with_options(_policy_class(written), written)


def _policy_class(written: _Written) -> type[Policy]:
    name = written.name
    found = [point for point in entry_points(group=GROUP) if point.name == name]
    holders = (["branchline"] if name in _OWN else []) + [_distribution(p) for p in found]
    if len(holders) > 1:
        raise ConfigError(
            f"policy {name!r}",
            f"has more than one definition: of {', '.join(holders)}",
            "uninstall all but one of these distributions, or rename the entry point of a plug-in",
        )
    if name in _OWN:
        return _OWN[name]
    if not found:
        known = ", ".join(policy_names())
        raise ConfigError(f"policy {written.text!r}", "is not known", f"choose one of: {known}")
    return _load(found[0])


def _load(point: EntryPoint) -> type[Policy]:
    subject = f"policy {point.name!r} of {_distribution(point)}"
    remedy = (
        "mend or uninstall that distribution, or choose another policy= (command line: --policy)"
    )
    try:
        loaded = point.load()
    # Whatever somebody else's module raises as it is imported is its fault, and told as such.
    except Exception as error:
        reason = f"cannot be loaded from {point.value}: {type(error).__name__}: {error}"
        raise ConfigError(subject, reason, remedy) from error
    reason = _fault(loaded, point.name)
    if reason:
        raise ConfigError(subject, f"{point.value} {reason}", remedy)
    return loaded


def _fault(loaded: Any, name: str) -> str:
    """Why `loaded` is no policy of that name; empty if it is."""
    if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
        return "is no subclass of branchline.policies.Policy"
    if getattr(loaded, "name", None) != name:
        return f"calls itself {getattr(loaded, 'name', None)!r}, not as its entry point does"
    if getattr(loaded, "__abstractmethods__", ()):
        return f"lacks {', '.join(sorted(loaded.__abstractmethods__))}"
    if issubclass(loaded, BaseModel):
        return "" if loaded.model_config.get("frozen") else "is a model that is not frozen"
    parameters = getattr(loaded, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return "is neither a frozen dataclass nor a frozen pydantic model, so it is no value"
    return ""


def _with_options(cls: type[Policy], written: _Written) -> Policy:
    known = _option_names(cls)
    unknown = [key for key in written.options if key not in known]
    if unknown:
        remedy = f"choose from: {', '.join(known)}" if known else "write its name alone"
        raise ConfigError(f"policy {written.text!r}", f"has no option {unknown[0]!r}", remedy)
    try:
        return TypeAdapter(cls).validate_python(dict(written.options))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"policy {written.text!r}",
            f"option {where}: {first['msg']}",
            f"write {written.name}:{where}=... with a value of its type",
        ) from error


def _option_names(cls: type[Policy]) -> tuple[str, ...]:
    if issubclass(cls, BaseModel):
        return tuple(cls.model_fields)
    assert dataclasses.is_dataclass(cls)
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


def _distribution(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else point.dist.name
