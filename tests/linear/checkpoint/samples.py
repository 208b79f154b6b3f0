"""Small checkpoints of every format: metadata, and tensors that are made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from branchline.linear.checkpoint import TensorHeader, read_metadata

FP8 = torch.float8_e4m3fn
LINEARS = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.gate",
    "lm_head",
)
Q, GATE_PROJ, ROUTER, HEAD = LINEARS
SHAPE = (160, 192)


def ct(weights=None, inputs=None, *, ignore=("lm_head", "re:.*mlp.gate$"), **fields):
    """A quantization_config of compressed-tensors with one group; per tensor unless said."""
    spec = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    group = {
        "targets": ["Linear"],
        "weights": {**spec, "dynamic": False, **(weights or {})},
        "input_activations": None if inputs is None else {**spec, "dynamic": False, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        **fields,
    }


def modelopt(algorithm="FP8", **fields):
    """A hf_quant_config.json."""
    quantization = {"quant_algo": algorithm, "exclude_modules": ["lm_head", "*mlp.gate"], **fields}
    return {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": quantization}


def fp8(**fields):
    """A quantization_config of method fp8, dynamic in blocks."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
        **fields,
    }


def quark(weight=None, inputs=None, **fields):
    """A quantization_config of Quark; static per tensor unless said."""
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "ch_axis": None, "is_dynamic": False}
    layer = {
        "bias": None,
        "output_tensors": None,
        "weight": {**spec, **(weight or {})},
        "input_tensors": {**spec, **(inputs or {})},
    }
    return {
        "quant_method": "quark",
        "global_quant_config": layer,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "*.mlp.gate"],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "quant_mode": "eager_mode",
        **fields,
    }


def write(folder: Path, config=None, *, own=None, **files) -> Path:
    """A folder whose config.json has `config` as quantization_config, and `own` for ModelOpt."""
    if config is not None:
        files["config.json"] = {"model_type": "llama", "quantization_config": config}
    if own is not None:
        files["hf_quant_config.json"] = own
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def read(folder: Path, config=None, *, own=None, **files):
    """What the metadata of such a folder says."""
    found = read_metadata(write(folder, config, own=own, **files))
    assert found is not None
    return found


def normal(*shape, seed=3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(*shape, seed=3) -> torch.Tensor:
    """FP8 codes that are no NaN."""
    return normal(*shape, seed=seed).mul(40).clamp(-448, 448).to(FP8)


def positive(*shape, seed=5) -> torch.Tensor:
    return normal(*shape, seed=seed).abs() * 0.01 + 0.001


def float_layers(*names: str) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": normal(*SHAPE).bfloat16() for name in names}


def layer(name: str, **parts: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}


def checkpoint(**parts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two quantised linears of these parts; the router and the head stay float."""
    tensors = {**layer(Q, **parts), **layer(GATE_PROJ, **parts)}
    return {**tensors, **float_layers(ROUTER, HEAD)}


def headers(tensors) -> dict[str, TensorHeader]:
    return {name: TensorHeader(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
