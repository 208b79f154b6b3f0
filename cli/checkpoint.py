"""Model and tokenizer from a folder: never from a hub, never with code of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import transformers
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..core.errors import WrapError

# What transformers raises for a folder that it cannot read.
_UNREADABLE = (
    ImportError,
    KeyError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)
_LONGEST_REASON = 240
_SHOWN_NAMES = 4


def load_model(folder: Path) -> PreTrainedModel:
    """The model in `folder`, of the class that it was saved from, in the checkpoint's dtype.

    Raises:
        WrapError: no such folder, or no complete checkpoint that transformers can read.
    """
    _check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # Any: the annotations do not know that a report makes it a pair.
        model_class: Any = _model_class(config, folder)
        model, report = model_class.from_pretrained(
            folder,
            config=config,
            dtype="auto",
            local_files_only=True,
            output_loading_info=True,
        )
    except _UNREADABLE as error:
        raise WrapError(
            f"model {str(folder)!r}",
            f"transformers cannot read it ({_one_line(error)})",
            "pass a complete checkpoint of an architecture that transformers itself brings",
        ) from error
    _check_complete(folder, report)
    return model


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, with something to pad with.

    Raises:
        WrapError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except _UNREADABLE as error:
        raise WrapError(
            f"model {str(folder)!r}",
            f"holds no readable tokenizer ({_one_line(error)})",
            "save the tokenizer into the same folder",
        ) from error
    if tokenizer.pad_token is None:
        # Padding is masked, so any token serves; a new one would lie outside the vocabulary.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _check_folder(folder: Path) -> None:
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


def _model_class(config: PreTrainedConfig, folder: Path) -> type[PreTrainedModel]:
    """The class the checkpoint names; a causal LM, or any model, of its type where it names none.

    A wrong guess cannot pass unseen: `_check_complete` finds the tensors that it lacks.
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


def _check_complete(folder: Path, report: dict[str, Any]) -> None:
    """transformers makes up what is missing, and drops what it does not know, with a warning."""
    for kind, names in (
        ("lacks tensors of the model", report["missing_keys"]),
        ("holds tensors that the model does not have", report["unexpected_keys"]),
        ("holds tensors of other shapes than the model's", report["mismatched_keys"]),
    ):
        if names:
            shown = ", ".join(sorted(str(name) for name in names)[:_SHOWN_NAMES])
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            raise WrapError(
                f"model {str(folder)!r}",
                f"{kind}: {shown}{more}",
                "pass the checkpoint as its training saved it",
            )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"
