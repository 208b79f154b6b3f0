"""Small random models with experts, one of each way in which transformers lays experts out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_KINDS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    # Gates and ups in halves; softmax over the chosen.
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "moe_intermediate_size": 128},
    ),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM, {"num_local_experts": 4}),
    # Gates and ups take turns, weights lie transposed, biases, a clamped activation.
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, {"num_local_experts": 4}),
    # Groups of experts, a dense first layer, shared experts beside the routed ones.
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "moe_intermediate_size": 128,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
    # Experts without gates, between layers of attention and of Mamba.
    "nemotron_h": (
        NemotronHConfig,
        NemotronHForCausalLM,
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "num_hidden_layers": 4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 128,
            "moe_shared_expert_intermediate_size": 128,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
}


def build(
    kind: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> PreTrainedModel:
    """A random model in eval mode, the same for the same arguments.

    Args:
        kind: one of `MODELS`.
        seed: of its weights.
        dtype: of its parameters.
        settings: of its config, over those that the kind has.
    """
    config_class, model_class, own = _KINDS[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SHAPE, **own, **settings})).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms away from 1, biases away from 0, weights large enough that an error would show.
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif parameter.dim() == 3 and "experts" in name:
                parameter.normal_(std=0.1)
            elif parameter.dim() == 2:
                parameter.normal_(std=0.08)
    return model.to(dtype).eval()


#: One builder a kind: bfloat16, in eval mode, always the same weights.
MODELS: dict[str, Callable[..., PreTrainedModel]] = {kind: partial(build, kind) for kind in _KINDS}


def token_ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, no special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
