"""A served random Llama on a device, and adapters for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

RANK = 16
VOCABULARY = 32_000


def config(hidden: int, layers: int) -> LlamaConfig:
    """Of a model whose heads have 64 columns."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        vocab_size=VOCABULARY,
    )


def model(shape: LlamaConfig, device: str) -> LlamaForCausalLM:
    """Always the same one, in bfloat16."""
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM(shape)
    return made.eval().to(device, torch.bfloat16)


def save_adapters(shape: LlamaConfig, folder: Path, names: Sequence[str], device: str) -> None:
    """Random adapters of all linears under these names, as PEFT saves them."""
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False)
    tuned: Any = get_peft_model(model(shape, device), lora)
    generator = torch.Generator(device).manual_seed(1)
    for name in names:
        for key, parameter in tuned.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        tuned.save_pretrained(folder / name)


def tokens(rows: int, columns: int, device: str) -> torch.Tensor:
    """Token ids (rows, columns)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (rows, columns), generator=generator).to(device)
