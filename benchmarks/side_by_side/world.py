"""A small random model with its tokenizer, and adapters for it, as folders that all sides load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RANK = 16


def save_model(folder: Path, hidden: int, layers: int) -> None:
    """A Llama in bfloat16 that never ends by itself, with one token a byte."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        vocab_size=len(alphabet),
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def save_endless(model: Path, folder: Path) -> None:
    """A model's folder that names no end of an answer, as links to the rest of its files."""
    folder.mkdir()
    for file in model.iterdir():
        copy = folder / file.name
        if file.name in ("config.json", "generation_config.json"):
            settings = json.loads(file.read_text(encoding="utf-8"))
            copy.write_text(json.dumps({**settings, "eos_token_id": None}), encoding="utf-8")
        else:
            copy.symlink_to(file.resolve())


def save_adapters(model: Path, folder: Path, count: int) -> list[Path]:
    """Random ones on every linear, of contents of their own."""
    base = LlamaForCausalLM.from_pretrained(model)
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    tuned: Any = get_peft_model(base, lora)
    folders = [folder / f"adapter{number}" for number in range(count)]
    for number, own in enumerate(folders):
        torch.manual_seed(number + 1)
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        tuned.save_pretrained(own)
    return folders


def prompts(requests: int, length: int) -> list[str]:
    """Texts of `length` bytes, no two alike."""
    text = "the quick brown fox jumps over the lazy dog and back again, "
    return [(f"{n:03} " + text * (length // len(text) + 1))[:length] for n in range(requests)]


def names(adapters: Sequence[Path], requests: int) -> list[str | None]:
    """By request, its adapter; the base where there are none."""
    return [adapters[row % len(adapters)].name if adapters else None for row in range(requests)]
