"""LoRA on experts: in which form a file keeps it, its shapes, and its parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from ...core.errors import AdapterUnsupportedError
from ..base import TargetExperts
from ..expert_names import apart_parts, is_apart
from ..lowering import experts as lowering
from ..lowering.base import Shapes
from ..lowering.experts import PARAMETER, STACKED, Apart
from ..lowering.lora import LoraSettings
from ..weights import ExpertsWeights
from .base import Module

#: Keys that PEFT refuses beside `target_parameters`.
REFUSED_BESIDE_PARAMETERS = (
    "use_dora",
    "lora_bias",
    "lora_dropout",
    "fan_in_fan_out",
    "use_bdlora",
    "alora_invocation_tokens",
)
# The first whose ParamWrapper takes the sizes of (E, N, K) for outputs and inputs.
_FIRST_IN_ORDER = (0, 19)
_VERSION = re.compile(r"(\d+)\.(\d+)(.*)", re.DOTALL)

#: The settings of a module that goes by an alias, after the patterns.
SettingsOf = Callable[[Module], LoraSettings]


def shapes(module: Module, settings_of: SettingsOf, peft_version: object) -> Shapes:
    """The shape of every tensor, in the form that the headers are of.

    Args:
        module: of experts, with its headers.
        settings_of: gives settings by a module's alias.
        peft_version: that wrote the file, as its config says.

    Raises:
        AdapterUnsupportedError: a variant that PEFT does not have on parameters, or what the halves
            are cannot be told.
    """
    target = _target(module)
    if is_apart(module):
        found = linears(module, settings_of)
        lowering.check_plain(found[0].settings, target)
        return lowering.apart_shapes(found, target)
    settings = settings_of(module)
    lowering.check_plain(settings, target)
    if module.headers.keys() & set(STACKED):
        sizes = [module.headers[part].shape for part in STACKED if part in module.headers]
        shared = [bool(size) and size[0] == 1 for size in sizes]
        both = (shared[0], shared[-1])
        return lowering.stacked_shapes(settings, target, shared=both)
    return lowering.parameter_shapes(settings, target, swapped=is_swapped(module, peft_version))


def rank(module: Module, settings_of: SettingsOf) -> int:
    """Of each expert's product."""
    if is_apart(module):
        return lowering.apart_rank(linears(module, settings_of), _target(module))
    return settings_of(module).rank


def lower(
    module: Module,
    tensors: dict[str, torch.Tensor],
    settings_of: SettingsOf,
    peft_version: object,
) -> ExpertsWeights:
    """The parts that the experts compute with.

    Args:
        module, settings_of, peft_version: as in `shapes`.
        tensors: of the module, by part.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `lowering.experts`.
    """
    target = _target(module)
    if is_apart(module):
        return lowering.lower_apart(tensors, linears(module, settings_of), target)
    settings = settings_of(module)
    if module.headers.keys() & set(STACKED):
        return lowering.lower_stacked(tensors, settings, target)
    swapped = is_swapped(module, peft_version)
    return lowering.lower_parameter(tensors, settings, target, swapped=swapped)


def linears(module: Module, settings_of: SettingsOf) -> tuple[Apart, ...]:
    """The linears of each expert that the file has tensors for: the same ones of every expert."""
    target = _target(module)
    present = {linear for _, linear, _ in apart_parts(module)}
    return tuple(
        Apart(
            number, linear, settings_of(replace(module, alias=f"{module.alias}.{number}.{linear}"))
        )
        for number in range(target.experts)
        for linear in target.linears
        if linear in present
    )


def is_swapped(module: Module, peft_version: object) -> bool:
    """Whether a parameter's halves lie in each other's place, as PEFT before 0.19 wrote them.

    Raises:
        AdapterUnsupportedError: inputs and outputs are of one size, and no version tells.
    """
    target = _target(module)
    if target.transposed or not module.headers:
        return False
    in_order = _writes_in_order(peft_version)
    if target.in_features == target.out_features:
        if in_order is None:
            raise AdapterUnsupportedError(
                f"adapter on {target.name}",
                "has as many inputs as outputs, and PEFT before 0.19 stored them the other way "
                "round; its config names no version of PEFT",
                "write peft_version, as of the training, into adapter_config.json",
            )
        return not in_order
    a, b = (module.headers.get(part) for part in PARAMETER)
    ends = (a.shape[-1:] if a else ()), (b.shape[:1] if b else ())
    return not in_order and ends == ((target.out_features,), (target.in_features,))


def _writes_in_order(peft_version: object) -> bool | None:
    match = _VERSION.match(peft_version) if isinstance(peft_version, str) else None
    if match is None:
        return None
    version = (int(match[1]), int(match[2]))
    if version >= _FIRST_IN_ORDER:
        return True
    # What was on its way to the next release may be either.
    return None if "dev" in match[3] else False


def _target(module: Module) -> TargetExperts:
    assert isinstance(module.target, TargetExperts)
    return module.target
