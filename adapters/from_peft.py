"""Adapters that already live in a `PeftModel`: their weights, and the plain model below them.

The weights go through the same checks as a folder. Taking the model out is all or nothing: what
cannot be undone (a merged adapter, a changed base weight) is refused before anything moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import AdapterNotFoundError, AdapterUnsupportedError, WrapError
from .base import BaseFacts
from .check import LoadPlan, TensorHeader
from .findings import listing, raise_findings
from .lora_config import parse_lora_config
from .names import parse_half
from .read import assemble, checked_plan
from .weights import AdapterWeights

_SUBJECT = "the PeftModel"
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def weights_from_peft(
    peft_model: nn.Module, name: str, base: BaseFacts, *, max_rank: int
) -> AdapterWeights:
    """Copy one adapter out of a `PeftModel`, with the checks of `read_adapter`.

    Args:
        peft_model: a `peft.PeftModel`; it is not changed.
        name: the adapter's name in it.
        base: facts about the plain model, by its names without PEFT (see `plain_modules`).
        max_rank: the rank the slots were sized for.

    Returns:
        Copies on the CPU in the dtypes of the live tensors. The digest equals that of the folder
        that `save_pretrained` writes.

    Raises:
        WrapError: no `PeftModel`, or an adapter in it is merged.
        AdapterNotFoundError: it has no adapter of that name.
        AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError, AdapterCapacityError:
            as in `read_adapter`; also if the live scaling is not the config's.
    """
    model = _require_peft_model(peft_model)
    source = f"PeftModel adapter {name!r}"
    if name not in model.peft_config:
        known = listing(sorted(model.peft_config)) or "none"
        raise AdapterNotFoundError(source, f"the model's adapters are {known}", "check the name")
    _refuse_merged(model)
    parsed = parse_lora_config(_plain(model.peft_config[name].to_dict()), source)
    tensors = _live_tensors(model, name)
    headers = [
        TensorHeader(key, _DTYPES.get(value.dtype, str(value.dtype)), tuple(value.shape))
        for key, value in tensors.items()
    ]
    plan = checked_plan(parsed, headers, base, max_rank=max_rank, subject=source)
    _check_live(model, name, plan, tensors, source)
    # A copy: training on, or unloading, must not reach what was loaded here.
    return assemble(
        plan,
        lambda key: tensors[key].detach().to("cpu", copy=True),
        source=source,
        subject=source,
    )


def _live_tensors(model: PeftModel, name: str) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names that `save_pretrained` gives them.

    Read off the layers: PEFT's own extraction cuts the adapter's name out of every key by text,
    so an adapter called like a module ("mlp") would lose tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path, layer in model.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for table in layer.adapter_layer_names:
            held = getattr(layer, table)
            if name not in held:
                continue
            value, prefix = held[name], f"base_model.model.{path}.{table}"
            if isinstance(value, torch.Tensor):
                tensors[prefix] = value
            else:
                for key, parameter in value.named_parameters():
                    tensors[f"{prefix}.{key}"] = parameter
    return tensors


def plain_modules(peft_model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module as `named_modules` of the model below would give them, without PEFT's layers.

    Serves to gather `BaseFacts` before anything is unwrapped.

    Raises:
        WrapError: no `PeftModel`.
    """
    tuner: list[str] = []
    for name, module in _require_peft_model(peft_model).get_base_model().named_modules():
        if tuner and name.startswith(f"{tuner[-1]}."):
            continue
        if isinstance(module, BaseTunerLayer):
            tuner.append(name)
            yield name, module.get_base_layer()
        else:
            yield name, module


def unwrap_peft(peft_model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Remove the LoRA layers of a `PeftModel`, without merging them.

    The model is changed in place: afterwards the `PeftModel` is an empty shell, and copies made by
    `weights_from_peft` are all that is left of its adapters. PEFT froze the base parameters
    (`requires_grad` is False), and they stay so.

    Returns:
        The plain base model, and the names of the adapters it had, in their order.

    Raises:
        WrapError: no `PeftModel`, a merged adapter, or LoRA on something else than a linear. The
            model is as it was.
        AdapterUnsupportedError: one of the adapters is no plain LoRA, saves modules whole, or
            changed the base weights. The model is as it was.
        AdapterFormatError: an adapter's config holds values of a wrong type.
    """
    model = _require_peft_model(peft_model)
    for name, config in model.peft_config.items():
        source = f"PeftModel adapter {name!r}"
        raise_findings(source, parse_lora_config(_plain(config.to_dict()), source).findings)
    _refuse_merged(model)
    _refuse_other_layers(model)
    names = list(model.peft_config)
    # PeftModel hands `unload` on to its tuner, which type checkers cannot see.
    return model.base_model.unload(), names  # type: ignore[operator]


def _require_peft_model(model: nn.Module) -> PeftModel:
    if not isinstance(model, PeftModel):
        raise WrapError(
            f"a {type(model).__name__}", "is no peft.PeftModel", "pass what get_peft_model returned"
        )
    return model


def _refuse_merged(model: PeftModel) -> None:
    merged = [
        name
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and module.merged
    ]
    if merged:
        raise WrapError(
            _SUBJECT,
            f"has adapters merged into its base weights ({len(merged)} layers)",
            "call unmerge_adapter() first",
        )


def _refuse_other_layers(model: PeftModel) -> None:
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise AdapterUnsupportedError(
                _SUBJECT,
                f"module {name!r} is trained whole or in part ({type(module).__name__}: "
                "modules_to_save or trainable_token_indices)",
                "train the adapter without them",
            )
        if not isinstance(module, BaseTunerLayer):
            continue
        base = module.get_base_layer()
        if not isinstance(module, LoraLayer) or not isinstance(base, (nn.Linear, Conv1D)):
            raise WrapError(
                _SUBJECT,
                f"module {name!r} carries {type(module).__name__} on a {type(base).__name__}",
                "only LoRA on nn.Linear or Conv1D can be taken out",
            )


def _check_live(
    model: PeftModel,
    name: str,
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    source: str,
) -> None:
    base = model.get_base_model()
    for layer, planned in plan.layers.items():
        half = parse_half(planned.a)
        live = base.get_submodule(half.module if half is not None else layer)
        scaling = live.scaling[name] if isinstance(live, LoraLayer) else planned.scaling
        if not math.isclose(scaling, planned.scaling, rel_tol=1e-12):
            raise AdapterUnsupportedError(
                source,
                f"layer {layer!r} is scaled by {scaling} but its config says {planned.scaling}",
                "call unscale_layer() or set lora_alpha instead",
            )
    on_meta = [key for key, value in tensors.items() if value.is_meta]
    if on_meta:
        raise AdapterUnsupportedError(
            source, f"tensors without data (meta device): {listing(on_meta)}", "load its weights"
        )


def _plain(value: Any) -> Any:
    """A live config as its JSON file would hold it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    return value
