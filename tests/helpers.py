"""What tests of several folders share: comparing bytes, editing saved files, a tiny tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype and bytes are the same, NaNs and zeros included."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def every_encoding(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """All 65,536 values of a dtype of two bytes, NaNs of every payload included."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def edit_json(file: Path, changes: Mapping[str, object]) -> None:
    """Set keys of a file's JSON object; None removes one."""
    document = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def edit_tensors(file: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Set tensors of a safetensors file; None removes one."""
    tensors = {**load_file(file), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, file, {"format": "pt"})


def edit_adapter(
    folder: Path, changes: Mapping[str, torch.Tensor | None] | None = None, **config: object
) -> Path:
    """Set tensors (None removes one) and keys of the config of an adapter's folder; gives it back.

    A key of the config that is set to None becomes null.
    """
    if changes:
        edit_tensors(folder / "adapter_model.safetensors", changes)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder


def make_tokenizer(*special: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level, ended by "<|end|>", and without a token for padding.

    Args:
        *special: further special tokens.
        chat_template: of its chats.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>")
    made.chat_template = chat_template
    return made
