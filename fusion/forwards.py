"""Forwards in the place of a model's own: of modules with traced activations, and of norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from .site import Site
from .trace import Cone, Settings


class OwnCone(nn.Module):
    """A cone by the model's own code, called as its site is: with `inputs`, in their order."""

    def __init__(self, cone: Cone, inputs: list[fx.Node]) -> None:
        super().__init__()
        # In a tuple, so that the model's modules do not become children of this one.
        self._function = (cone.function,)
        self._order = [inputs.index(node) for node in cone.inputs]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._function[0](*(inputs[i] for i in self._order))


class TracedForward:
    """The forward of a module whose cones are computed by sites.

    The proof holds for the modules that were there.  If one was replaced, patched or hooked since,
    the module's own forward runs instead: its linears are then fed raw, which is always right.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], cones: list[tuple[Cone, Site]]
    ) -> None:
        self._module = module
        self._forward = forward
        self._sites = [site for _, site in cones]
        self._children = tuple(module._modules.items())
        self._inside = tuple(inner for cone, _ in cones for inner in cone.modules.values())
        # The trace has the numbers of the module in it, and the proof those of the others.
        self._settings = [(part, Settings(part)) for part in (module, *self._inside)]

    def __call__(self, x: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            change = self._change()
            if change:
                for site in self._sites:
                    site.count_own_code(change)
                return type(self._module).forward(self._module, x)
        return self._forward(x)

    def _change(self) -> str:
        held = self._module._modules
        for name, child in self._children:
            if held.get(name) is not child:
                return f"{name} was replaced after wrapping"
        for inner in self._inside:
            if "forward" in vars(inner):
                return f"{type(inner).__qualname__} was patched after wrapping"
            if inner._forward_hooks or inner._forward_pre_hooks:
                return f"{type(inner).__qualname__} carries a foreign hook"
        for part, settings in self._settings:
            if not settings.hold():
                return f"the settings of {type(part).__qualname__} were changed after wrapping"
        return ""


class NormForward:
    """The forward of a norm whose site decides: (x) to what its linears take.

    If what it was proved with has changed since, the norm's own forward runs instead.
    """

    def __init__(self, site: Site, module: nn.Module) -> None:
        self._site = site
        self._module = module
        self._settings = Settings(module)
        self._vectors = _vectors(module)

    def __call__(self, x: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling() and not self._holds():
            self._site.count_own_code("its settings were changed after wrapping")
            return self._site.own_rows_of(type(self._module).forward(self._module, x), x)
        return self._site(x, *self.vectors())

    def vectors(self) -> tuple[torch.Tensor, ...]:
        """What the site is handed beside the activation."""
        return tuple(getattr(self._module, name) for name in self._vectors)

    def _holds(self) -> bool:
        return self._settings.hold() and _vectors(self._module) == self._vectors


def _vectors(module: nn.Module) -> tuple[str, ...]:
    """Which of (weight, bias) it has, in the order of a site's inputs."""
    own = module._parameters
    return tuple(
        name
        for name in ("weight", "bias")
        if (own[name] if name in own else getattr(module, name, None)) is not None
    )
