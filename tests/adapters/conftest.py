"""A tiny base model's facts, and a plain adapter folder, for the tests of reading."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from branchline.adapters.base import BaseFacts, TargetLayer


def _facts(
    model: nn.Module | Mapping[str, nn.Module],
    refusals: Mapping[str, str] | None = None,
    **changes,
) -> BaseFacts:
    named = dict(model.named_modules()) if isinstance(model, nn.Module) else model
    layers = {}
    for name, module in named.items():
        if isinstance(module, (nn.Linear, Conv1D)):
            shape = tuple(module.weight.shape)
            inputs, outputs = shape if isinstance(module, Conv1D) else shape[::-1]
            layers[name] = TargetLayer(name, inputs, outputs, (refusals or {}).get(name))
    values = {
        "layers": layers,
        "modules": tuple(named),
        "task": "CAUSAL_LM",
        "output_embedding": "lm_head",
        "model_type": "llama",
    }
    return BaseFacts(**(values | changes))


@pytest.fixture(scope="session")
def facts() -> Callable[..., BaseFacts]:
    """Facts about a model (or its named modules), with refusals by layer and changed fields."""
    return _facts


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """A maker of the model that the cases are for."""

    def make(**extra) -> LlamaForCausalLM:
        torch.manual_seed(1)
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=256,
                **extra,
            )
        )

    return make


@pytest.fixture(scope="session")
def base(tiny_llama) -> BaseFacts:
    """Facts about the tiny model."""
    return _facts(tiny_llama())


@pytest.fixture
def plain(tmp_path) -> Path:
    """The folder of a plain adapter of rank 8 on q_proj and v_proj of both layers."""
    folder = tmp_path / "plain"
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in (0, 1):
        for name, outputs in (("q_proj", 64), ("v_proj", 32)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 64, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
