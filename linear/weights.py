"""Which modules are linears we understand, and their weights on the FP8 grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from .quantized_linear import QuantizedLinear

LinearModule = nn.Linear | Conv1D
#: What a model's linears may be: its own, or those of a quantised checkpoint.
AnyLinear = LinearModule | QuantizedLinear


def linear_refusal(module: nn.Module) -> str | None:
    """Why `module` cannot be wrapped; None where it can.  Looks at behaviour, not at names."""
    reason = kind_refusal(module)
    if reason is None and isinstance(module, LinearModule) and module.weight.is_meta:
        return "its weight lies on the meta device"
    return reason


def kind_refusal(module: nn.Module, *, own_forward: bool = True) -> str | None:
    """Why `module` is no linear that we understand, wherever its weight lies; None where it is.

    Args:
        module: any.
        own_forward: refuse one whose forward was put on the object; false where the caller knows
            what it does.
    """
    cls = type(module)
    if not isinstance(module, (nn.Linear, Conv1D)):
        return f"{cls.__qualname__} is neither nn.Linear nor transformers' Conv1D"
    if parametrize.is_parametrized(module):
        return f"{cls.__qualname__} computes its weight by a parametrization"
    parent = nn.Linear if isinstance(module, nn.Linear) else Conv1D
    if cls.forward is not parent.forward or (own_forward and "forward" in vars(module)):
        return f"{cls.__qualname__} has a forward of its own"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return f"{cls.__qualname__} is never called: its owner computes with its weight"
    weight: torch.Tensor = module.weight
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight is not initialised yet"
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return f"its weight is {weight.dtype}"
    return None


def linear_shape(module: AnyLinear) -> tuple[int, int]:
    """(N, K) of an `nn.Linear` or a `Conv1D`, whose weight is stored transposed."""
    if isinstance(module, Conv1D):
        return module.weight.shape[1], module.weight.shape[0]
    return module.out_features, module.in_features


def linear_device(module: AnyLinear) -> torch.device:
    """Where its weight lies."""
    return module.device if isinstance(module, QuantizedLinear) else module.weight.device


def float_weight(module: LinearModule) -> torch.Tensor:
    """The weight as (N, K)."""
    weight = module.weight.detach()
    return weight.t() if isinstance(module, Conv1D) else weight


@dataclass(frozen=True, eq=False)
class FoundLinear:
    """A linear that can be wrapped.

    Attributes:
        module: the linear.
        paths: every name it has in the model; the first is the one it is called by.
    """

    module: AnyLinear
    paths: tuple[str, ...]


def find_linears(model: nn.Module) -> tuple[dict[str, FoundLinear], dict[str, str]]:
    """The linears of `model` that can be wrapped, and why the others cannot; by name."""
    paths: dict[int, list[str]] = {}
    modules: dict[int, AnyLinear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, AnyLinear):
            paths.setdefault(id(module), []).append(name)
            modules[id(module)] = module
    found: dict[str, FoundLinear] = {}
    refused: dict[str, str] = {}
    for key, module in modules.items():
        reason = None if isinstance(module, QuantizedLinear) else linear_refusal(module)
        if reason is None:
            found[paths[key][0]] = FoundLinear(module, tuple(paths[key]))
        else:
            refused[paths[key][0]] = reason
    return found, refused


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` where `path` leads."""
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
