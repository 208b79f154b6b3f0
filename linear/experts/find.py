"""Which modules hold experts that we understand, and how they lay their weights out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from .form import ExpertsForm
from .quantized import QuantizedExperts

#: What transformers' `use_experts_implementation` says of an experts module.
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


@dataclass(frozen=True, eq=False)
class FoundExperts:
    """An experts module that can be wrapped.

    Attributes:
        module: with 3-D parameters, called with (hidden states, chosen experts, their weights).
        paths: every name it has in the model; the first is the one it is called by.
        form: how it computes.
    """

    module: nn.Module
    paths: tuple[str, ...]
    form: ExpertsForm

    @property
    def name(self) -> str:
        """What it is called by."""
        return self.paths[0]


def holds_experts(module: nn.Module) -> bool:
    """Whether transformers runs this module by its experts interface."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, torch.Tensor) and all(hasattr(module, flag) for flag in _FLAGS)


def experts_form(module: nn.Module, *, own_forward: bool = True) -> ExpertsForm | str:
    """How an experts module computes; a reason where that is not understood.

    Args:
        module: any of which `holds_experts` is true.
        own_forward: refuse one whose forward was put on the object; false where the caller knows
            what it does.
    """
    cls = type(module).__qualname__
    flags = {flag: bool(getattr(module, flag)) for flag in _FLAGS}
    gated, transposed = flags["has_gate"], flags["is_transposed"]
    up_name, down_name = "gate_up_proj" if gated else "up_proj", "down_proj"
    wanted = {up_name, "down_proj"}
    if flags["has_bias"]:
        wanted |= {f"{up_name}_bias", "down_proj_bias"}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if own != wanted:
        return f"{cls} holds {', '.join(sorted(own))}, expected {', '.join(sorted(wanted))}"
    if parametrize.is_parametrized(module):
        return f"{cls} computes its weights by a parametrization"
    if own_forward and "forward" in vars(module):
        return f"the forward of this {cls} was patched onto the object"
    up: torch.Tensor = getattr(module, up_name)
    down: torch.Tensor = getattr(module, down_name)
    if up.dim() != 3 or down.dim() != 3:
        return f"{cls} holds weights of {up.dim()} and {down.dim()} dimensions, expected 3"
    if not up.dtype.is_floating_point or up.dtype.itemsize < 2:
        return f"its weights are {up.dtype}"
    experts, channels, hidden = up.mT.shape if transposed else up.shape
    if gated and channels % 2:
        return f"its {up_name} has {channels} channels, no gates and ups"
    form = ExpertsForm(
        experts,
        hidden,
        channels // 2 if gated else channels,
        gated,
        interleaved=gated and not flags["is_concatenated"],
        transposed=transposed,
        has_bias=flags["has_bias"],
        post_norm=flags["has_post_expert_norm"],
    )
    found = tuple(down.mT.shape if transposed else down.shape)
    if found != form.shape("down_proj"):
        return f"its down_proj has shape {found}, expected {form.shape('down_proj')}"
    return form


def _form_of(module: nn.Module) -> ExpertsForm | str:
    return module.form if isinstance(module, QuantizedExperts) else experts_form(module)


def find_experts(model: nn.Module) -> tuple[dict[str, FoundExperts], dict[str, str]]:
    """The experts of `model` that can be wrapped, and why others cannot; by name."""
    paths: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedExperts) or holds_experts(module):
            paths.setdefault(id(module), []).append(name)
            modules[id(module)] = module
    found: dict[str, FoundExperts] = {}
    refused: dict[str, str] = {}
    for key, module in modules.items():
        form = _form_of(module)
        if isinstance(form, str):
            refused[paths[key][0]] = form
        else:
            found[paths[key][0]] = FoundExperts(module, tuple(paths[key]), form)
    return found, refused


def stored_weight(module: nn.Module, form: ExpertsForm, projection: str) -> torch.Tensor:
    """(E, N, K), a view of a projection's weight; gates before ups where they take turns."""
    weight: torch.Tensor = getattr(module, projection).detach()
    weight = weight.mT if form.transposed else weight
    return in_order(weight, form, projection)


def stored_bias(module: nn.Module, form: ExpertsForm, projection: str) -> torch.Tensor | None:
    """(E, N), in the order of `stored_weight`'s channels; None where there is none."""
    if not form.has_bias:
        return None
    bias: torch.Tensor = getattr(module, f"{projection}_bias").detach()
    return in_order(bias.unsqueeze(2), form, projection).squeeze(2)


def as_stored(weight: torch.Tensor, form: ExpertsForm, projection: str) -> torch.Tensor:
    """What `stored_weight` was taken from: gates and ups take turns again where they did."""
    if form.interleaved and projection == form.up_name:
        weight = torch.stack(weight.chunk(2, 1), 2).flatten(1, 2)
    return weight.mT if form.transposed else weight


def in_order(channels: torch.Tensor, form: ExpertsForm, projection: str) -> torch.Tensor:
    """(E, N, ...) as stored, with all gates before all ups; a view where nothing moves."""
    if not form.interleaved or projection != form.up_name:
        return channels
    return torch.cat([channels[:, ::2], channels[:, 1::2]], 1)
