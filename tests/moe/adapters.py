"""Adapters on experts, written by PEFT itself, and PEFT's own results with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from branchline.adapters.weights import ExpertsWeights
from tests.moe.models import build

BOTH = ("gate_up_proj", "down_proj")


def parameters_of(kind: str) -> tuple[str, str]:
    """What PEFT's `target_parameters` call both projections of a kind of model."""
    # Beside experts.up_proj, shared experts have linears of that name.
    return ("experts.up_proj", "experts.down_proj") if kind == "nemotron_h" else BOTH


def with_adapter(
    model: PreTrainedModel,
    parameters: tuple[str, ...] | list[str] | None,
    modules: list[str],
    *,
    seed: int = 1,
    rank: int = 4,
    **settings: Any,
) -> PeftModel:
    """`model` with a random adapter that PEFT put onto it, in eval mode."""
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=modules,
        target_parameters=None if parameters is None else list(parameters),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **settings,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return wrapped.eval()


def save(
    folder: Path,
    kind: str,
    parameters: tuple[str, ...] | None,
    modules: list[str],
    *,
    shape: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Path:
    """The folder of a random adapter for a kind of model, whose config takes `shape`."""
    plain = build(kind, dtype=torch.float32, **shape)
    with_adapter(plain, parameters, modules, **settings).save_pretrained(folder)
    return folder


def loaded_by_peft(model: PreTrainedModel, folder: Path) -> PeftModel:
    """`model` with an adapter that PEFT reads itself, in eval mode."""
    with warnings.catch_warnings():
        # Of patterns that it does match with parameters.
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, folder).eval()


def peft_logits(model: PreTrainedModel, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What PEFT computes with an adapter that it loads itself."""
    with torch.no_grad():
        return loaded_by_peft(model, folder)(ids).logits


def delta(parts: ExpertsWeights, experts: int) -> torch.Tensor:
    """(E, N, K): what the parts add to the weight of each expert."""
    a, b = (half.float().expand(experts, -1, -1) for half in (parts.a, parts.b))
    return parts.scaling * (b @ a)
