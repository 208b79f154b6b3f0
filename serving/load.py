"""Models from a folder: never from a hub, never with code of the checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ..core.errors import BranchlineError, CheckpointError, WrapError
from ..linear.checkpoint import CheckpointQuant, TensorHeader, read_metadata
from .folder import (
    UNREADABLE,
    check_complete,
    check_folder,
    model_class,
    one_line,
    read_config,
    some,
    unreadable,
    without_quantization,
)
from .quantized_loader import LoaderConfig, QuantizedLoader
from .shards import has_shards, read_headers, shard_files
from .stored_model import is_codes, with_notes

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def load_model(folder: str | Path, *, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """The model in `folder`, of the class that it was saved from.

    Of a quantised checkpoint every quantised linear becomes a `QuantizedLinear`, and the experts of
    a layer a `QuantizedExperts`, which hold codes and scales; `model.branchline_checkpoint` then
    says what was read from where.  Such a model runs once it is wrapped.

    Args:
        folder: of the checkpoint.
        dtype: of what is not quantised, and of activations; "auto" is the checkpoint's own.

    Raises:
        WrapError: no such folder, or no complete checkpoint that transformers can read.
        CheckpointError: quantised in a way that is not served, or that contradicts itself.
        ScaleError: a scale that cannot be used.
    """
    folder = Path(folder)
    check_folder(folder)
    try:
        config = without_quantization(read_config(folder))
        metadata = read_metadata(folder)
        if metadata is not None:
            return _load_quantized(folder, config, metadata, dtype)
        model, report = _from_pretrained(folder, config, dtype=dtype)
    except BranchlineError:
        raise
    except UNREADABLE as error:
        raise unreadable(folder, error) from error
    check_complete(folder, report)
    refuse_codes(folder)
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
    except UNREADABLE as error:
        raise WrapError(
            f"model {str(folder)!r}",
            f"holds no readable tokenizer ({one_line(error)})",
            "save the tokenizer into the same folder",
        ) from error
    if tokenizer.pad_token is None:
        # Padding is masked, so any token serves; a new one would lie outside the vocabulary.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _load_quantized(
    folder: Path, config: PreTrainedConfig, metadata: CheckpointQuant, dtype: str | torch.dtype
) -> PreTrainedModel:
    files = shard_files(folder)
    if dtype == "auto" and config.dtype not in _FLOATS:
        dtype = _dtype_of(folder, read_headers(files))
    settings = {"quantization_config": LoaderConfig(metadata), "use_safetensors": True}
    model, report = _from_pretrained(folder, config, dtype=dtype, **settings)
    loader = getattr(model, "hf_quantizer", None)
    assert isinstance(loader, QuantizedLoader)
    unexpected = report["unexpected_keys"]
    check_complete(folder, {**report, "unexpected_keys": loader.unused(unexpected)})
    resolved = loader.install(model)
    ignored = loader.ignored(unexpected)
    notes = [f"of the KV cache and not used: {some(ignored)}"] if ignored else []
    # Any: an attribute of ours on a class of transformers'.
    noted: Any = model
    noted.branchline_checkpoint = with_notes(resolved, notes)
    return model


def _from_pretrained(
    folder: Path, config: PreTrainedConfig, **settings: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    # Any: the annotations do not know that a report makes it a pair.
    found: Any = model_class(config, folder)
    return found.from_pretrained(
        folder,
        config=config,
        local_files_only=True,
        output_loading_info=True,
        # The report then names what `check_complete` refuses.
        ignore_mismatched_sizes=True,
        **settings,
    )


def _dtype_of(folder: Path, headers: dict[str, TensorHeader]) -> torch.dtype:
    """The dtype of the weights that are not quantised, where the config does not say."""
    counts = Counter(
        header.dtype
        for name, header in headers.items()
        if name.endswith(".weight") and header.dtype in _FLOATS
    )
    if len(counts) != 1:
        raise CheckpointError(
            f"model {str(folder)!r}",
            f"its config names no dtype, and its weights have {some(counts) or 'none'}",
            "add dtype to config.json, or pass dtype= to branchline.load_model",
        )
    return next(iter(counts))


def refuse_codes(folder: Path, *, whole: bool = True) -> None:
    """Refuse codes without metadata: transformers casts them to the model's dtype silently.

    Args:
        folder: of the checkpoint.
        whole: as of `read_headers`.

    Raises:
        CheckpointError: the checkpoint in `folder` holds such tensors, or cannot be read.
    """
    if not has_shards(folder):
        return
    headers = read_headers(shard_files(folder), whole=whole)
    codes = [name for name, header in headers.items() if is_codes(name, header)]
    if codes:
        raise CheckpointError(
            f"model {str(folder)!r}",
            f"holds codes ({some(codes)}), but nothing says how it is quantised",
            "restore config.json as the checkpoint was saved with it",
        )
