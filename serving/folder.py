"""A checkpoint folder: what must lie in it, and the model class that it names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..core.errors import WrapError

#: What transformers raises for a folder that it cannot read.
UNREADABLE = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
_LONGEST_REASON = 240
_SHOWN_NAMES = 4
_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


def check_folder(folder: Path) -> None:
    """Refuse what is no folder of a transformers model.

    Raises:
        WrapError: no folder, one without config.json, or one of an adapter.
    """
    subject, remedy = f"model {str(folder)!r}", "pass the folder of a transformers checkpoint"
    if not folder.is_dir():
        reason = "is no folder" if folder.exists() else "does not exist"
        raise WrapError(subject, reason, f"{remedy} (names on a hub are not looked up)")
    if (folder / "adapter_config.json").is_file():
        # transformers would load that adapter too, and not say so.
        raise WrapError(
            subject, "holds a PEFT adapter", "pass its base model, and this folder as --adapter"
        )
    if not (folder / "config.json").is_file():
        raise WrapError(subject, "holds no config.json", remedy)


def read_config(folder: Path) -> PreTrainedConfig:
    """The config in `folder`, without running code of the checkpoint.

    Raises:
        OSError, ValueError, ...: one of `UNREADABLE`, whatever transformers raises.
    """
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """`config`, in which neither it nor a part of it says that the model is quantised."""
    for field in _QUANTIZATION_FIELDS:
        vars(config).pop(field, None)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            without_quantization(part)
    return config


def model_class(config: PreTrainedConfig, folder: Path) -> type[PreTrainedModel]:
    """The class the checkpoint names; a causal LM, or any model, of its type where it names none.

    A wrong guess cannot pass unseen: `check_complete` finds the tensors that it lacks.

    Raises:
        WrapError: transformers brings no such class.
    """
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if type(config) in mapping:
            return cast(type[PreTrainedModel], mapping[type(config)])
    raise WrapError(
        f"model {str(folder)!r}",
        f"its architecture {config.architectures} is unknown to transformers",
        "upgrade transformers, or pass another model",
    )


def check_complete(folder: Path, report: dict[str, Any]) -> None:
    """transformers makes up what is missing, and drops what it does not know, with a warning.

    Raises:
        WrapError: `report` names such tensors.
    """
    for kind, names in (
        ("lacks tensors of the model", report["missing_keys"]),
        ("holds tensors that the model does not have", report["unexpected_keys"]),
        ("holds tensors of other shapes than the model's", report["mismatched_keys"]),
    ):
        if names:
            raise WrapError(
                f"model {str(folder)!r}",
                f"{kind}: {some(names)}",
                "pass the checkpoint as its training saved it",
            )


def unreadable(folder: Path, error: Exception) -> WrapError:
    """What to raise where transformers cannot read `folder`."""
    return WrapError(
        f"model {str(folder)!r}",
        f"transformers cannot read it ({one_line(error)})",
        "pass a complete checkpoint of an architecture that transformers itself brings",
    )


def some(names: Collection[Any]) -> str:
    """A few of `names`, and how many more there are."""
    shown = ", ".join(sorted(str(name) for name in names)[:_SHOWN_NAMES])
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{shown}{more}"


def one_line(error: Exception) -> str:
    """The message of `error`, on one line and not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"
