"""Model and tokenizer from a folder: never from a hub, never with code of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..core.errors import WrapError
from ..serving.folder import UNREADABLE, one_line
from ..serving.load import load_model

__all__ = ["load_model", "load_tokenizer"]


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
