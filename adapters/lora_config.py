"""adapter_config.json of a LoRA adapter: every key is served, harmless or refused by name.

The tables cover PEFT 0.2 to 0.21. A key that stands in none of them is refused unless its value is
null, false or empty: a newer PEFT may have given it a meaning that changes the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..core.errors import AdapterFormatError, AdapterUnsupportedError
from .findings import Finding, damaged, raise_findings, unsupported

CONFIG_NAME = "adapter_config.json"

# Keys that `LoraConfigFile` reads, and the two that must have one value.
SERVED = frozenset(
    {
        "peft_type",  # must be "LORA"
        "bias",  # must be "none"
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "task_type",
    }
)

# Keys that change nothing in what saved tensors mean, with the reason.
HARMLESS: Mapping[str, str] = {
    "auto_mapping": "names the base model's class",
    "base_model_name_or_path": "a name; the base is checked by names, shapes and task",
    "corda_config": "settings of an initialisation",
    "eva_config": "settings of an initialisation; the ranks it found are in rank_pattern",
    # PEFT corrects it to what the module is (False for nn.Linear, True for Conv1D) and stores
    # lora_A (r, K) and lora_B (N, r) either way.
    "fan_in_fan_out": "the layout of the base weight",
    "inference_mode": "whether PEFT freezes the tensors",
    "init_lora_weights": "checked by `_check_initialisation`: most only fill A and B",
    "lora_dropout": "acts in training only",
    "lora_ga_config": "settings of an initialisation",
    "loftq_config": "settings of an initialisation",
    "megatron_core": "read only together with megatron_config, which is refused",
    "merge_weights": "PEFT 0.2: whether evaluation merges",
    "peft_version": "who wrote the file",
    "qalora_group_size": "read only together with use_qalora, which is refused",
    "revision": "of the base model",
    "runtime_config": "PEFT itself ignores it in a file",
}

# Keys that must be off (null, false or empty), with the name of the feature.
REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "enable_lora": "grouped LoRA of PEFT 0.2",
    "ensure_weight_tying": "tied adapters",
    "kasa_config": "KaSA",
    "layer_replication": "layer replication",
    "lora_bias": "a bias on lora_B",
    "megatron_config": "Megatron layers",
    "modules_to_save": "modules saved whole",
    "monteclora_config": "Monteclora",
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "trained tokens",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}

# Initialisations that fill A and B and leave the base weight alone.
_PLAIN_INITIALISATIONS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# These subtract the first B @ A from the base weight (LoftQ: replace it). A and B then belong to
# the changed weight, and without it the sum is wrong.
_BASE_CHANGING_INITIALISATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")


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
Alpha = Annotated[int | float, AfterValidator(_finite)]
Index = Annotated[int, Field(ge=0)]
Regex = Annotated[str, AfterValidator(_whole_pattern)]
EndRegex = Annotated[str, AfterValidator(_ending_pattern)]
ListRegex = Annotated[str, AfterValidator(_list_pattern)]


class LoraConfigFile(BaseModel):
    """The served keys of adapter_config.json, with PEFT's defaults except for `r` and `lora_alpha`.

    Those two have no default: every PEFT version writes them, and a file without them would
    otherwise be scaled by a guess.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    rank_pattern: dict[EndRegex, Rank] = {}
    alpha_pattern: dict[EndRegex, Alpha] = {}
    target_modules: list[str] | Regex | None = None
    exclude_modules: list[str] | Regex | None = None
    layers_to_transform: list[Index] | Index | None = None
    layers_pattern: list[ListRegex] | ListRegex | None = None
    task_type: str | None = None

    @model_validator(mode="after")
    def _check_layer_selection(self) -> LoraConfigFile:
        # PEFT refuses the same combinations.
        if isinstance(self.target_modules, str):
            for key in ("layers_to_transform", "layers_pattern"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} cannot go with target_modules as one string")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern needs layers_to_transform")
        return self


class ParsedConfig(NamedTuple):
    """A config whose values are sound; it may still ask for what is not served.

    Args:
        config: the served keys.
        findings: the features that are not served.
        refused: the keys those findings are about (tensors of such a feature need no finding of
            their own).
    """

    config: LoraConfigFile
    findings: list[Finding]
    refused: frozenset[str]


def load_config(data: bytes, subject: str) -> dict[str, Any]:
    """Decode the bytes of an adapter_config.json.

    Raises:
        AdapterFormatError: no JSON, no object, or a key that occurs twice.
    """
    remedy = f"restore {CONFIG_NAME} as PEFT wrote it"
    try:
        raw = json.loads(data, object_pairs_hook=_unique)
    except RecursionError as error:
        raise AdapterFormatError(subject, f"{CONFIG_NAME} is nested too deep", remedy) from error
    except ValueError as error:  # covers bad UTF-8 and endless digits too
        raise AdapterFormatError(subject, f"{CONFIG_NAME} is no JSON ({error})", remedy) from error
    if not isinstance(raw, dict):
        raise AdapterFormatError(subject, f"{CONFIG_NAME} holds no JSON object", remedy)
    return raw


def parse_lora_config(raw: Mapping[str, Any], subject: str) -> ParsedConfig:
    """Check a decoded config.

    Raises:
        AdapterFormatError: of another tool, without `peft_type`, or with values of a wrong type.
        AdapterUnsupportedError: of another PEFT type than LORA.
    """
    _check_tool_and_type(raw, subject)
    findings, refused = _check_features(raw)
    # null in place of an empty dict or of false is what an absent key means.
    fields = {
        key: raw[key]
        for key in LoraConfigFile.model_fields
        if key in raw and not (raw[key] is None and key not in ("r", "lora_alpha"))
    }
    try:
        return ParsedConfig(LoraConfigFile(**fields), findings, refused)
    except ValidationError as error:
        raise_findings(subject, [*_value_findings(error), *findings])
        raise


def _check_tool_and_type(raw: Mapping[str, Any], subject: str) -> None:
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
    kind = raw.get("peft_type")
    if not isinstance(kind, str):
        state = "has no peft_type" if kind is None else f"has peft_type {kind!r}, which is no text"
        raise AdapterFormatError(
            subject, f"{CONFIG_NAME} {state}", "use an adapter that PEFT saved"
        )
    if kind != "LORA":
        raise AdapterUnsupportedError(
            subject, f"PEFT type {kind!r} is not served", "only LORA adapters can be loaded"
        )


def _check_features(raw: Mapping[str, Any]) -> tuple[list[Finding], frozenset[str]]:
    findings = []
    refused = set()
    for key in sorted(raw):
        value = raw[key]
        if key in REFUSED:
            if not _is_off(value):
                refused.add(key)
                text = f"{REFUSED[key]} ({key}={_short(value)}) is not served"
                findings.append(unsupported(text, f"train the adapter without {key}"))
        elif key not in SERVED and key not in HARMLESS and not _is_off(value):
            text = f"{CONFIG_NAME} has the unknown key {key!r} = {_short(value)}"
            findings.append(unsupported(text, f"remove {key} if it changes nothing at inference"))
    bias = raw.get("bias", "none")
    if bias not in ("none", None):
        refused.add("bias")
        text = f"trained biases (bias={_short(bias)}) are not served"
        findings.append(unsupported(text, "train the adapter with bias='none'"))
    return findings + _check_initialisation(raw.get("init_lora_weights")), frozenset(refused)


def _check_initialisation(value: object) -> list[Finding]:
    if value is None or isinstance(value, bool):
        return []
    name = value.lower() if isinstance(value, str) else None
    if name in _PLAIN_INITIALISATIONS:
        return []
    if name is not None and name.startswith(_BASE_CHANGING_INITIALISATIONS):
        text = f"init_lora_weights={_short(value)} changes the base weights it was trained against"
        remedy = (
            "save it as plain LoRA with PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
        return [unsupported(text, remedy)]
    text = f"init_lora_weights={_short(value)} is unknown"
    return [unsupported(text, "use an initialisation that leaves the base weights alone")]


def _value_findings(error: ValidationError) -> list[Finding]:
    # A union reports once a member; the first message of a key is enough.
    first: dict[str, str] = {}
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        key = location[0] if location else "the layer selection"
        told = location and item["type"] != "missing"
        value = f", got {_short(item['input'])}" if told else ""
        first.setdefault(key, f"{CONFIG_NAME}: {key}: {item['msg']}{value}")
    return [damaged(text, f"restore {CONFIG_NAME} as PEFT wrote it") for text in first.values()]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the key {twice[0]!r} occurs twice")
    return result


def _is_off(value: object) -> bool:
    # Not `not value`: a zero is a setting.
    return value is None or value is False or value in ("", [], {})


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
