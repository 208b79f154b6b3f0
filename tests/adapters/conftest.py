"""A tiny base model's facts, and a plain adapter folder, for the tests of reading."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from branchline.adapters.base import BaseFacts
from branchline.serving.base_facts import base_facts


def _facts(model: nn.Module, refusals: Mapping[str, str] | None = None, **changes) -> BaseFacts:
    return replace(base_facts(model), **changes).with_refusals(refusals or {})


@pytest.fixture(scope="session")
def facts() -> Callable[..., BaseFacts]:
    """Facts about a model, with refusals by module and changed fields."""
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


class ModelWeights:
    """The float weights of a model, as lowering asks for them."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())

    def weight(self, name: str) -> torch.Tensor:
        """Of a linear (N, K), of an embedding (V, D)."""
        weight = self.modules[name].weight.detach()
        return (weight.T if isinstance(self.modules[name], Conv1D) else weight).float().contiguous()

    def bias(self, name: str) -> torch.Tensor | None:
        """Of a linear."""
        bias = self.modules[name].bias
        return None if bias is None else bias.detach().float()


@pytest.fixture(scope="session")
def base_weights() -> type[ModelWeights]:
    """A maker of `BaseWeights` out of a float model."""
    return ModelWeights


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
