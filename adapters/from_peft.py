"""Adapters that already live in a `PeftModel`: their weights, and the plain model below them.

The weights go through the same checks as a folder. Taking the model out is all or nothing: what
cannot be undone (a merged adapter, a changed base weight) is refused before anything moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.adalora.layer import AdaLoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from ..core.errors import AdapterNotFoundError, AdapterUnsupportedError, WrapError
from .assemble import assemble
from .base import BaseFacts, BaseWeights, TargetExperts
from .check import LoadPlan, PlannedModule
from .config_file import parse_config
from .findings import listing, raise_findings
from .names import PEFT_PREFIX
from .pickle_file import tensor_header
from .read import checked_plan
from .tuners.products import rank_masks
from .weights import AdapterWeights

_SUBJECT = "the PeftModel"
_REPLACEMENTS = (BaseTunerLayer, AuxiliaryTrainingWrapper)


@dataclass(frozen=True, eq=False)
class TakenAdapter:
    """One adapter of a `PeftModel`, checked and copied, to be lowered when its base is at hand.

    Args:
        source: "PeftModel adapter 'x'".
        plan: what its tensors are.
        tensors: copies on the CPU, by the names that `save_pretrained` gives them.
        config: the decoded config.
    """

    source: str
    plan: LoadPlan
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]

    def lower(self, base_weights: BaseWeights | None = None) -> AdapterWeights:
        """Its parts.

        Args:
            base_weights: the model's, for what cannot be lowered without them (DoRA).

        Raises:
            AdapterFormatError, AdapterUnsupportedError: as in `assemble`.
        """
        weights = assemble(
            self.plan,
            lambda names: {name: self.tensors[name] for name in names},
            source=self.source,
            subject=self.source,
            base_weights=base_weights,
        )
        return replace(weights, config=self.config)


def take_from_peft(
    peft_model: nn.Module, name: str, base: BaseFacts, *, max_rank: int
) -> TakenAdapter:
    """Copy one adapter out of a `PeftModel`, with the checks of `read_adapter`.

    Args:
        peft_model: a `peft.PeftModel`; it is not changed.
        name: the adapter's name in it.
        base: facts about the plain model, by its names without PEFT (see `plain_modules`).
        max_rank: the rank the slots were sized for.

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
    raw = _plain(model.peft_config[name].to_dict())
    parsed = parse_config(raw, source)
    live = _live_tensors(model, name)
    _refuse_meta(live, source)
    headers = [tensor_header(key, value) for key, value in live.items()]
    plan = checked_plan(parsed, headers, base, max_rank=max_rank, subject=source)
    _check_scalings(model, name, plan, source)
    # Copies: training on, or unloading, must not reach what was taken here.
    tensors = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in live.items()}
    return TakenAdapter(source, plan, tensors, MappingProxyType(raw))


def weights_from_peft(
    peft_model: nn.Module,
    name: str,
    base: BaseFacts,
    *,
    max_rank: int,
    base_weights: BaseWeights | None = None,
) -> AdapterWeights:
    """Take one adapter out of a `PeftModel` and lower it at once.

    Args:
        peft_model, name, base, max_rank: as in `take_from_peft`.
        base_weights: the plain model's weights, for what cannot be lowered without them (DoRA).

    Returns:
        Copies on the CPU in the dtypes of the live tensors. The digest equals that of the folder
        that `save_pretrained` writes.

    Raises:
        WrapError, AdapterError: as in `take_from_peft` and `TakenAdapter.lower`.
    """
    return take_from_peft(peft_model, name, base, max_rank=max_rank).lower(base_weights)


def _live_tensors(model: PeftModel, name: str) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names that `save_pretrained` gives them.

    Read off the layers: PEFT's own extraction cuts the adapter's name out of every key by text,
    so an adapter called like a module ("mlp") would lose tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    start = getattr(model.base_model, "prefix", "")
    for path, module in model.get_base_model().named_modules():
        prefix = f"{PEFT_PREFIX}{path}"
        if isinstance(module, ModulesToSaveWrapper):
            if name in module.modules_to_save:
                held = module.modules_to_save[name].state_dict(keep_vars=True)
                tensors.update({f"{prefix}.{key}": value for key, value in held.items()})
        elif isinstance(module, BaseTunerLayer) and not getattr(module, "tied_adapter", None):
            tensors.update(_layer_tensors(module, name, prefix, start))
    _keep_ranks(tensors, model.peft_config[name])
    tuner = model.base_model
    for table in ("vera_A", "vera_B"):
        shared = getattr(tuner, table, None)
        if shared is not None and getattr(model.peft_config[name], "save_projection", False):
            tensors[f"base_model.{table}"] = shared[name]
    return tensors


def _keep_ranks(tensors: dict[str, torch.Tensor], config: Any) -> None:
    """Cut AdaLoRA's tensors to the ranks that its pattern keeps, as `save_pretrained` does."""
    if config.peft_type != "ADALORA":
        return
    for module, mask in rank_masks(config.rank_pattern or {}).items():
        kept = torch.tensor(mask)
        for part, dimension in (("lora_E", 0), ("lora_A", 0), ("lora_B", 1)):
            key = f"{PEFT_PREFIX}{module}.{part}"
            value = tensors.get(key)
            # Loading cuts the live tensors as well, and keeps the pattern.
            if value is not None and value.shape[dimension] == len(mask):
                index = kept.nonzero().flatten().to(value.device)
                tensors[key] = value.index_select(dimension, index)


def _layer_tensors(
    layer: BaseTunerLayer, name: str, prefix: str, start: str
) -> dict[str, torch.Tensor]:
    """The tensors of one layer, from the tables that PEFT saves: those it names by its prefix."""
    tensors: dict[str, torch.Tensor] = {}
    fixed = [table for table in layer.other_param_names if start and table.startswith(start)]
    for table in dict.fromkeys((*layer.adapter_layer_names, *fixed)):
        held = getattr(layer, table, None)
        if not isinstance(held, (nn.ModuleDict, nn.ParameterDict, BufferDict)) or name not in held:
            continue
        if isinstance(held, BufferDict) and not held.persistent:
            continue
        value = held[name]
        if isinstance(value, torch.Tensor):
            tensors[f"{prefix}.{table}"] = value
            continue
        if value is None:
            continue
        for key, parameter in value.named_parameters():
            # The magnitudes are modules of one vector, which PEFT saves by the table's name alone.
            is_vector = table == "lora_magnitude_vector"
            tensors[f"{prefix}.{table}" if is_vector else f"{prefix}.{table}.{key}"] = parameter
    return tensors


def plain_modules(peft_model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module as `named_modules` of the model below would give them, without PEFT's layers.

    Serves to gather `BaseFacts` before anything is unwrapped.

    Raises:
        WrapError: no `PeftModel`.
    """
    replaced: list[str] = []
    for name, module in _require_peft_model(peft_model).get_base_model().named_modules():
        if replaced and name.startswith(f"{replaced[-1]}."):
            continue
        if not _is_replacement(module):
            yield name, module
            continue
        replaced.append(name)
        for inner, below in _original(module).named_modules():
            yield (f"{name}.{inner}" if inner else name), below


def peft_layers(peft_model: nn.Module) -> dict[str, nn.Module]:
    """The modules that PEFT put in the place of the model's own, by name, outermost ones only.

    Raises:
        WrapError: no `PeftModel`.
    """
    found: dict[str, nn.Module] = {}
    for name, module in _require_peft_model(peft_model).get_base_model().named_modules():
        inside = found and name.startswith(f"{next(reversed(found))}.")
        if not inside and _is_replacement(module):
            found[name] = module
    return found


def _is_replacement(module: nn.Module) -> bool:
    return isinstance(module, _REPLACEMENTS)


def _original(module: nn.Module) -> nn.Module:
    """What PEFT put a module in the place of."""
    while _is_replacement(module):
        if isinstance(module, ModulesToSaveWrapper):
            module = module.original_module
        elif isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter.get_base_layer()
        elif isinstance(module, BaseTunerLayer):
            module = module.get_base_layer()
        else:
            raise WrapError(
                _SUBJECT, f"holds a {type(module).__name__}, which is not known", "unload it first"
            )
    return module


def unwrap_peft(peft_model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Remove what PEFT put into the model below a `PeftModel`, without merging it.

    The model is changed in place: afterwards the `PeftModel` is an empty shell, and copies made by
    `weights_from_peft` are all that is left of its adapters. PEFT froze the base parameters
    (`requires_grad` is False), and they stay so.

    Returns:
        The plain base model, and the names of the adapters it had, in their order.

    Raises:
        WrapError: no `PeftModel`, or a merged adapter. The model is as it was.
        AdapterUnsupportedError: one of the adapters is of a type or has a feature that is not
            served, or changed the base weights. The model is as it was.
        AdapterFormatError: an adapter's config holds values of a wrong type.
    """
    model = _require_peft_model(peft_model)
    for name, config in model.peft_config.items():
        source = f"PeftModel adapter {name!r}"
        raise_findings(source, parse_config(_plain(config.to_dict()), source).findings)
    _refuse_merged(model)
    plain = model.get_base_model()
    originals = {name: _original(module) for name, module in peft_layers(model).items()}
    for name, original in originals.items():
        plain.set_submodule(name, original)
    return plain, list(model.peft_config)


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


def _refuse_meta(tensors: Mapping[str, torch.Tensor], source: str) -> None:
    on_meta = [key for key, value in tensors.items() if value.is_meta]
    if on_meta:
        raise AdapterUnsupportedError(
            source, f"tensors without data (meta device): {listing(on_meta)}", "load its weights"
        )


def _check_scalings(model: PeftModel, name: str, plan: LoadPlan, source: str) -> None:
    """Refuse a layer whose live scaling is not what its config says."""
    base = model.get_base_model()
    for layer, planned in plan.modules.items():
        expected = getattr(plan.tuner.settings(plan.config, planned.module), "scaling", None)
        live = _live_layer(base, planned)
        held = getattr(live, "scaling", None) or getattr(live, "fourierft_scaling", None)
        if expected is None or not planned.module.headers or not held:
            continue
        scaling = float(held[name])
        if isinstance(live, AdaLoraLayer):
            scaling = float(scaling / (live.ranknum[name] + 1e-5))
        if not math.isclose(scaling, expected, rel_tol=1e-12):
            raise AdapterUnsupportedError(
                source,
                f"layer {layer!r} is scaled by {scaling} but its config says {expected}",
                "call unscale_layer() or set lora_alpha instead",
            )


def _live_layer(base: nn.Module, planned: PlannedModule) -> nn.Module:
    """What PEFT put in the place of a module, or around the experts for one of their parameters."""
    if not isinstance(planned.target, TargetExperts):
        return base.get_submodule(planned.module.alias)
    path, _, parameter = planned.module.alias.rpartition(".")
    layer = base.get_submodule(path)
    while isinstance(layer, ParamWrapper) and layer.parameter_name != parameter:
        layer = layer.base_layer
    return layer


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
