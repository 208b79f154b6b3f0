"""adapter_config.json: every key is served, harmless or refused by name, by its type's tables.

The tables cover PEFT 0.2 to 0.21.  A key that stands in none of them is refused unless its value
is null, false or empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from ..core.errors import AdapterFormatError, AdapterUnsupportedError
from ..linear.checkpoint.document import is_off, short, unique_keys
from .file_names import CONFIG_NAME
from .findings import Finding, damaged, raise_findings, unsupported
from .identity import NamedBase
from .tuners import TUNERS, UNSERVED
from .tuners.base import TunerType
from .tuners.config import TunerConfig


class ParsedConfig(NamedTuple):
    """A config whose values are sound; it may still ask for what is not served.

    Args:
        tuner: the PEFT type.
        config: the served keys.
        findings: the features that are not served.
        refused: the keys those findings are about (tensors of such a feature need no finding of
            their own).
        base_model: what it says of the base model.
    """

    tuner: TunerType[Any]
    config: TunerConfig
    findings: list[Finding]
    refused: frozenset[str]
    base_model: NamedBase = NamedBase()


def load_config(data: bytes, subject: str) -> dict[str, Any]:
    """Decode the bytes of an adapter_config.json.

    Raises:
        AdapterFormatError: no JSON, no object, or a key that occurs twice.
    """
    remedy = f"restore {CONFIG_NAME} as PEFT wrote it"
    try:
        raw = json.loads(data, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise AdapterFormatError(subject, f"{CONFIG_NAME} is nested too deep", remedy) from error
    except ValueError as error:  # covers bad UTF-8 and endless digits too
        raise AdapterFormatError(subject, f"{CONFIG_NAME} is no JSON ({error})", remedy) from error
    if not isinstance(raw, dict):
        raise AdapterFormatError(subject, f"{CONFIG_NAME} holds no JSON object", remedy)
    return raw


def parse_config(raw: Mapping[str, Any], subject: str) -> ParsedConfig:
    """Check a decoded config.

    Raises:
        AdapterFormatError: of another tool, without `peft_type`, or with values of a wrong type.
        AdapterUnsupportedError: of a PEFT type that is not served.
    """
    tuner = _tuner(raw, subject)
    findings, refused = _check_features(tuner, raw)
    # null in place of an empty dict or of false is what an absent key means.
    fields = {
        key: raw[key]
        for key in tuner.config.model_fields
        if key in raw and not (raw[key] is None and key not in tuner.keys.required)
    }
    base = (raw.get(key) for key in ("base_model_name_or_path", "revision"))
    base_model = NamedBase(*(value if isinstance(value, str) else "" for value in base))
    try:
        config = tuner.config(**fields)
    except ValidationError as error:
        raise_findings(subject, [*_value_findings(error), *findings])
        raise
    return ParsedConfig(tuner, config, findings, refused, base_model)


def _tuner(raw: Mapping[str, Any], subject: str) -> TunerType[Any]:
    _check_tool(raw, subject)
    kind = raw.get("peft_type")
    if not isinstance(kind, str):
        state = "has no peft_type" if kind is None else f"has peft_type {kind!r}, which is no text"
        raise AdapterFormatError(
            subject, f"{CONFIG_NAME} {state}", "use an adapter that PEFT saved"
        )
    if kind in TUNERS:
        return TUNERS[kind]
    if kind in UNSERVED:
        unserved = UNSERVED[kind]
        raise AdapterUnsupportedError(
            subject, f"PEFT type {kind!r} is not served: it {unserved.reason}", unserved.remedy
        )
    raise AdapterUnsupportedError(
        subject, f"PEFT type {kind!r} is not known", f"use one of {', '.join(sorted(TUNERS))}"
    )


def _check_tool(raw: Mapping[str, Any], subject: str) -> None:
    remedy = "convert it to PEFT's format"
    if "fine_tune_type" in raw or "lora_parameters" in raw:
        raise AdapterFormatError(subject, f"{CONFIG_NAME} is of mlx-lm, not of PEFT", remedy)
    version = raw.get("version")
    if "peft_type" not in raw and (
        (isinstance(version, str) and version.startswith("adapters."))
        or ("model_class" in raw and isinstance(raw.get("config"), (dict, str)))
    ):
        raise AdapterFormatError(
            subject, f"{CONFIG_NAME} is of AdapterHub's adapters library, not of PEFT", remedy
        )


def _check_features(
    tuner: TunerType[Any], raw: Mapping[str, Any]
) -> tuple[list[Finding], frozenset[str]]:
    keys, findings, refused = tuner.keys, [], set()
    known = keys.all_served | keys.all_harmless.keys()
    for key in sorted(raw):
        value = raw[key]
        if key in keys.refused:
            if not is_off(value):
                refused.add(key)
                text = f"{keys.refused[key]} ({key}={short(value)}) is not served"
                findings.append(unsupported(text, f"train the adapter without {key}"))
        elif key not in known and not is_off(value):
            text = f"{CONFIG_NAME} has the unknown key {key!r} = {short(value)}"
            findings.append(unsupported(text, f"remove {key} if it changes nothing at inference"))
    for key in sorted(keys.optional_none):
        if raw.get(key, "none") not in ("none", None):
            refused.add(key)
            text = f"trained biases ({key}={short(raw[key])}) are not served"
            findings.append(unsupported(text, f"train the adapter with {key}='none'"))
    return [*findings, *tuner.check_config(raw)], frozenset(refused)


def _value_findings(error: ValidationError) -> list[Finding]:
    # A union reports once a member; the first message of a key is enough.
    first: dict[str, str] = {}
    # Of these, what is said of a value of the right type tells more than another type.
    errors = error.errors(include_url=False)
    for item in sorted(errors, key=lambda item: item["type"] != "value_error"):
        location = [str(part) for part in item["loc"]]
        key = location[0] if location else "the module selection"
        told = location and item["type"] != "missing"
        value = f", got {short(item['input'])}" if told else ""
        first.setdefault(key, f"{CONFIG_NAME}: {key}: {item['msg']}{value}")
    return [damaged(text, f"restore {CONFIG_NAME} as PEFT wrote it") for text in first.values()]
