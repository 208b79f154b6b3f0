"""Small random models of the families that must wrap, and adapters made for them by PEFT."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

VOCABULARY = 256

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE),
    "gemma3": Gemma3TextConfig(**_SHAPE, sliding_window=8),
    "phi3": Phi3Config(**{k: v for k, v in _SHAPE.items() if k != "head_dim"}),
    "nemotron": NemotronConfig(**_SHAPE, hidden_act="relu2"),
    "gpt2": GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_inner=128,
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
    ),
}

#: Three sets of targets for every family: attention, MLP with the down projection, everything.
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "llama": (["q_proj", "v_proj"], ["gate_proj", "down_proj"]),
    "qwen3": (["q_proj", "k_proj", "v_proj"], ["up_proj", "down_proj"]),
    "gemma3": (["q_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]),
    "phi3": (["qkv_proj"], ["down_proj"]),
    "nemotron": (["q_proj", "v_proj"], ["up_proj", "down_proj"]),
    "gpt2": (["c_attn"], ["c_fc"]),
}


def build(family: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """A random model in eval mode, the same for the same arguments."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights away from 1 (or 0), linears large enough that an error would show.
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() == 2:
                parameter.normal_(std=0.08)
    return model.to(dtype).eval()


def save_adapter(
    model: nn.Module, folder: Path, targets: list[str] | str, *, rank: int, seed: int, **settings
) -> Path:
    """A random PEFT LoRA folder for `model`, whose B is not zero; the model is not changed."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=settings.pop("lora_alpha", 2 * rank),
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **settings,
    )
    peft_model = get_peft_model(copy.deepcopy(model).float(), config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.5)
    peft_model.save_pretrained(folder)
    return folder


def token_ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, no special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
