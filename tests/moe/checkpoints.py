"""Folders of quantised models with experts, in the layouts that such models are published in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from branchline.core.scheme import BLOCK_128, PER_CHANNEL, PER_TENSOR, WeightScheme
from branchline.linear.quantized_weight import QuantizedWeight
from tests.helpers import edit_json

_LINEAR = re.compile(r"(_proj|_proj_with_mqa|_a_proj|_b_proj|\.w[123])\.weight$")

#: From a linear's name and float weight to its tensors, by the last part of their names; None
#: where it stays.
Quantize = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor] | None]


def fp8_config(**fields: Any) -> dict[str, Any]:
    """A `quantization_config` as fine-grained FP8 checkpoints have it."""
    return {
        "quant_method": "fp8",
        "fmt": "float8_e4m3fn",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        **fields,
    }


def ct_config(strategy: str, inputs: str | None = "token", **fields: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    spec = {"num_bits": 8, "type": "float", "symmetric": True}
    static = inputs == "tensor"
    taken = None if inputs is None else {**spec, "strategy": inputs, "dynamic": not static}
    weights = {**spec, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        taken = {**spec, "strategy": "group", "group_size": 128, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": taken}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"],
        **fields,
    }


def quantized_as(
    scheme: WeightScheme, scale: str = "weight_scale", **more: Callable[[str], torch.Tensor]
) -> Quantize:
    """Every linear by one scheme; `more` makes further tensors by the linear's name."""

    def quantize(name: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        made = QuantizedWeight.from_float(weight, name, scheme)
        stored = made.scale.reshape(()) if scheme == PER_TENSOR else made.scale
        others = {part: make(name) for part, make in more.items()}
        return {"weight": made.codes, scale: stored, **others}

    return quantize


def fine_grained(**more: Callable[[str], torch.Tensor]) -> Quantize:
    """Blocks of 128x128 under `weight_scale_inv`."""
    return quantized_as(BLOCK_128, "weight_scale_inv", **more)


def per_channel() -> Quantize:
    """A scale a channel."""
    return quantized_as(PER_CHANNEL)


def per_tensor(**more: Callable[[str], torch.Tensor]) -> Quantize:
    """A scale a linear."""
    return quantized_as(PER_TENSOR, **more)


def write(
    folder: Path, model: PreTrainedModel, quantize: Quantize, config: Mapping[str, Any]
) -> Path:
    """Save `model` under its published names, its linears quantised.

    Args:
        folder: to be made.
        model: float.
        quantize: of every linear, those of single experts included.
        config: for `quantization_config`.
    """
    model.save_pretrained(folder)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        linear = is_quantized(name, tensor)
        parts = quantize(name.removesuffix(".weight"), tensor) if linear else None
        if parts is None:
            made[name] = tensor
        else:
            made |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in parts.items()}
    save(folder, made)
    edit_json(folder / "config.json", {"quantization_config": dict(config)})
    return folder


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a model under the names that its checkpoints are published with."""
    return dict(revert_weight_conversion(model, model.state_dict()))


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    """Whether `write` takes a tensor for the weight of a linear."""
    return tensor.dim() == 2 and bool(_LINEAR.search(name)) and "lm_head" not in name


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's config.json."""
    edit_json(folder / "config.json", fields)


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace a folder's tensors."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Damage a folder: `edit` is handed its tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save(folder, tensors)


def stack(folder: Path, model: PreTrainedModel) -> None:
    """Turn linears of single experts into 3-D tensors under the model's own names."""
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not hasattr(module, "gate_up_proj") or not name.endswith("experts"):
            continue
        for part, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            by_kind = {
                kind: [tensors.pop(f"{name}.{e}.{kind}.{part}") for e in range(module.num_experts)]
                for kind in ("gate_proj", "up_proj", "down_proj")
            }
            pairs = zip(by_kind["gate_proj"], by_kind["up_proj"], strict=True)
            stacked = [_cat([gate, up]) for gate, up in pairs]
            tensors[f"{name}.gate_up_proj{suffix}"] = _stack(stacked)
            tensors[f"{name}.down_proj{suffix}"] = _stack(by_kind["down_proj"])
    save(folder, tensors)


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def quantization(folder: Path) -> dict[str, Any]:
    """The `quantization_config` of a folder."""
    return json.loads((folder / "config.json").read_text())["quantization_config"]
