"""A configuration from several places: flags over the environment over a file over defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError

from ..core.errors import ConfigError
from .settings import Settings

_Config = TypeVar("_Config", bound=Settings)

ENV_PREFIX = "BRANCHLINE_"
#: What vLLM's users have set already, by the field that it means; ours goes before.
VLLM_VARIABLES: Mapping[str, str] = {
    "api_key": "VLLM_API_KEY",
    "allow_runtime_lora_updating": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
}
# A configuration is a page; whatever is longer is another file.
_LONGEST_FILE = 2**20


def layered(model: type[_Config], flags: Mapping[str, Any], file: Path | None) -> _Config:
    """The configuration that the flags, the environment and a file together say.

    Only what one of them says counts as set.

    Args:
        model: of the configuration.
        flags: by field; not checked yet.
        file: YAML with fields for keys (with "-" or "_"); None for none.

    Raises:
        ConfigError: the file cannot be used, or a value is refused; the subject tells where it
            comes from.
    """
    from_file = {} if file is None else read_file(model, file)
    from_environment, variables = _read_environment(model)
    try:
        return model.model_validate({**from_file, **from_environment, **flags})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        # A validator's own exception says more than pydantic's wrapping of it.
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        if not name:
            raise ConfigError("the configuration", reason, "correct the settings") from error
        if name in flags:
            subject = f"--{name.replace('_', '-')}"
        else:
            subject = variables.get(name) or f"{file}: {name}"
        told = "" if _is_secret(model, name) else f" {first['input']!r}"
        raise ConfigError(f"{subject}{told}", reason, "correct it") from error


def read_file(model: type[Settings], file: Path) -> dict[str, Any]:
    """The settings in a YAML file, by field; their values are not checked yet.

    Raises:
        ConfigError: it cannot be read, is no YAML, or has a key that is unknown or there twice.
    """
    subject = f"configuration file {str(file)!r}"
    try:
        with file.open("rb") as opened:
            content = opened.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(subject, f"cannot be read ({error.strerror})", "correct it") from error
    if len(content) > _LONGEST_FILE:
        raise ConfigError(subject, f"is longer than {_LONGEST_FILE} bytes", "shorten it")
    try:
        found = yaml.load(content.decode(), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(subject, f"is no YAML ({reason})", "correct it") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(subject, "is no mapping of settings", "write lines such as port: 8000")
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in model.model_fields or name in values:
            unknown = name not in model.model_fields
            state = "has the unknown setting" if unknown else "has twice the setting"
            near = get_close_matches(name, model.model_fields, 3, 0.5)
            hint = f"did you mean {' or '.join(near)}? " if near and unknown else ""
            known = ", ".join(sorted(model.model_fields))
            raise ConfigError(subject, f"{state} {str(key)!r}", f"{hint}known settings: {known}")
        values[name] = value
    return values


class _Loader(yaml.SafeLoader):
    """Plain data, without a key that is there twice: YAML would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


class _Environment(EnvSettingsSource):
    """Fields from variables; a list is JSON, and what is no list is its one entry."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return json.loads(value) if value.lstrip().startswith("[") else value


def _read_environment(model: type[Settings]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the environment says by field, and the variable that says it."""
    # pydantic-settings reads for one of its own models.
    settings = type(f"{model.__name__}Variables", (model, BaseSettings), {})
    try:
        values = dict(_Environment(settings, env_prefix=ENV_PREFIX, case_sensitive=False)())
    except SettingsError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the environment ({ENV_PREFIX}...)", reason, 'write lists as JSON: ["a", "b"]'
        ) from error
    variables = {name: ENV_PREFIX + name.upper() for name in values}
    for name, variable in VLLM_VARIABLES.items():
        if name in model.model_fields and name not in values and variable in os.environ:
            values[name], variables[name] = os.environ[variable], variable
    return values, variables


def _is_secret(model: type[Settings], name: str) -> bool:
    field = model.model_fields.get(name)
    return field is not None and SecretStr.__name__ in str(field.annotation)
