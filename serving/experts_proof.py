"""Proof by equality: what a layer's experts compute, found by running them on made-up weights (I4).

transformers' experts say by flags how their weights lie, and their forward is code.  A class may
inherit the flags and compute something else, so both are run and compared.  The weights are made
up: those of a quantised checkpoint exist as codes alone, and zeros would prove nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..fusion.experts import RoutedExperts
from ..fusion.identify import PROBE_ERRORS
from ..linear.experts.form import ExpertsForm
from ..linear.experts.layer import ExpertsLinear
from ..linear.hooks import hooks_suspended
from ..linear.probing import probing
from ..linear.registry import LayerRegistry
from .expert_kernels import float_experts

_EAGER = "eager"
#: Sizes of tokens: where activations are clamped, and where they are nearly linear.
_SIZES = (1.0, 16.0, 0.0625, 1.0)
#: Of the largest output of a token; sums of float32 in another order stay far below it.
_TOLERANCE = 1e-4


class ExpertsProof:
    """Compares experts with the form that their flags promise.

    Weights are made up once a form, and modules of one class with one content are run once: a
    model has dozens of layers.
    """

    def __init__(self) -> None:
        self._weights: dict[ExpertsForm, dict[str, torch.Tensor]] = {}
        self._known: dict[object, str] = {}

    def difference(self, name: str, module: nn.Module, form: ExpertsForm) -> str:
        """Why `module` is not served by its form; empty where it is.

        Args:
            name: of the experts, for messages.
            module: the model's own; its weights are neither read nor changed, and may lie on the
                meta device.
            form: what its flags promise.
        """
        content = (form, _content(module))
        if content not in self._known:
            self._known[content] = self._difference(name, module, form)
        return self._known[content]

    def _difference(self, name: str, module: nn.Module, form: ExpertsForm) -> str:
        cls = type(module).__qualname__
        # Foreign hooks must see no probe.
        with hooks_suspended(module):
            double = self._double(module, form)
        with torch.no_grad(), probing(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            ours = _served(name, double, form)
            for tokens in (len(_SIZES), 1):
                given = _probe(form, tokens)
                try:
                    near = _near(ours(*given), type(double).forward(double, *given))
                except PROBE_ERRORS as error:
                    return f"{cls} fails on probes ({type(error).__name__}: {error})"
                if not near:
                    return f"the forward of {cls} computes something else than its flags promise"
        return ""

    def _double(self, module: nn.Module, form: ExpertsForm) -> Any:
        """`module` with made-up weights in float32 on the CPU, and no hooks."""
        weights = self._weights.get(form)
        if weights is None:
            weights = self._weights[form] = _made_up(form)
        double = copy.copy(module)
        own = vars(double)
        own["_parameters"] = {
            name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()
        }
        own["_buffers"] = {
            name: None if buffer is None else _values(buffer)
            for name, buffer in own["_buffers"].items()
        }
        own["_modules"] = {name: _copied(child) for name, child in own["_modules"].items()}
        if _runs_transformers_own(module):
            # All that transformers comes with compute what the class's own forward defines.
            # Deep: the setting reaches the configs inside of it.
            own["config"] = copy.deepcopy(own["config"])
            own["config"]._experts_implementation = _EAGER
        return double


def _content(module: nn.Module) -> tuple[object, ...]:
    """What a module computes with beside its parameters; equal only where that is the same."""
    return tuple(
        (name, type(part), *((key, _identity(value)) for key, value in _own(part)))
        for name, part in module.named_modules()
    )


def _own(part: nn.Module) -> Iterator[tuple[str, object]]:
    yield from part._buffers.items()
    yield from (
        (k, v) for k, v in vars(part).items() if not (k.startswith("_") and isinstance(v, dict))
    )


def _identity(value: object) -> object:
    return value if isinstance(value, int | float | str | None) else id(value)


def _runs_transformers_own(module: nn.Module) -> bool:
    """Whether the implementation that the config names is one of transformers itself."""
    config = getattr(module, "config", None)
    chosen = getattr(config, "_experts_implementation", None)
    if chosen is None or chosen == _EAGER:
        return config is not None
    function = ALL_EXPERTS_FUNCTIONS.get(chosen)
    return getattr(function, "__module__", "").startswith("transformers.")


def _copied(child: nn.Module | None) -> nn.Module | None:
    if child is None:
        return None
    # Values of its parameters are the same on both sides, so that ones will do for absent ones.
    memo = {id(p): _values(p) for p in (*child.parameters(), *child.buffers())}
    return copy.deepcopy(child, memo)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        values = torch.ones(tensor.shape)
    else:
        floating = tensor.is_floating_point()
        values = tensor.detach().to("cpu", torch.float32 if floating else tensor.dtype, copy=True)
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _made_up(form: ExpertsForm) -> dict[str, torch.Tensor]:
    """Weights and biases as a module of this form stores them."""
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for projection in (form.up_name, form.down_name):
        experts, outputs, inputs = form.shape(projection)
        rows, columns = (inputs, outputs) if form.transposed else (outputs, inputs)
        # Each expert's weight begins a row after the one before: all differ, and few bytes do.
        tall = torch.randn(experts + rows, columns, generator=generator) * inputs**-0.5
        made[projection] = tall.as_strided((experts, rows, columns), (columns, columns, 1))
        if form.has_bias:
            made[f"{projection}_bias"] = torch.randn(experts, outputs, generator=generator)
    return made


def _probe(form: ExpertsForm, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, chosen experts (the first and the last among them), and their weights."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = torch.tensor(_SIZES[:tokens]).unsqueeze(1)
    hidden = torch.randn(tokens, form.hidden, generator=generator) * sizes
    last = form.experts - 1
    choices = [0, last, 1 % form.experts]
    top_k = min(2, form.experts)
    index = torch.tensor(
        [[choices[(t + j) % len(set(choices))] for j in range(top_k)] for t in range(tokens)]
    )
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return hidden, index, weights


def _served(name: str, double: Any, form: ExpertsForm) -> Callable[..., torch.Tensor]:
    """Our experts with the weights of `double`."""
    registry = LayerRegistry()
    layers = []
    for projection in (form.up_name, form.down_name):
        layer = ExpertsLinear(
            f"{name}.{projection}",
            len(registry),
            float_experts(double, form, projection),
            registry,
            torch.float32,
            torch.device("cpu"),
            by_token=projection == form.up_name,
        )
        registry.add(layer)
        layers.append(layer)
    up, down = layers
    return RoutedExperts(name, form, up, down, double, registry).run


def _near(ours: torch.Tensor, wanted: Any) -> bool:
    if not isinstance(wanted, torch.Tensor) or wanted.shape != ours.shape:
        return False
    largest = wanted.double().abs().amax(-1, keepdim=True)
    return bool(((ours.double() - wanted.double()).abs() <= _TOLERANCE * largest).all())
