"""Finding the sites of a model, and putting them in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.oracle import NormSemantics
from ..linear.hooks import unwatch_hooks
from ..linear.registry import LayerRegistry, SharedInput
from ..linear.routed import RoutedLinear, RowLayout
from .identify import identify_activation, identify_norm
from .raw import norm_raw
from .record import Reading, record, row_layouts
from .site import Site, SiteFacts
from .trace import Cone, find_cones, replace_cones, trace_forward


@dataclass(frozen=True)
class Unsited:
    """A linear whose input no site makes, and why: it is always fed raw."""

    layer: str
    reason: str


@dataclass(frozen=True, eq=False)
class Discovery:
    """What was found, and how to put it in place or take it out again.

    Attributes:
        sites: in the order of their index.
        unsited: linears without one.
        install: replaces the forwards; run it once.
        uninstall: undoes `install`.
    """

    sites: tuple[Site, ...]
    unsited: tuple[Unsited, ...]
    install: Callable[[], None]
    uninstall: Callable[[], None]


class _Discoverer:
    def __init__(self, model: nn.Module, registry: LayerRegistry) -> None:
        self.model = model
        self.registry = registry
        self.names = {id(module): name for name, module in model.named_modules()}
        self.sites: list[Site] = []
        self.reasons: dict[str, str] = {}
        self.replacements: list[tuple[nn.Module, Callable[..., Any]]] = []

    def add_site(
        self, facts: SiteFacts, layers: tuple[RoutedLinear, ...], raw: Any, observed: Any
    ) -> Site:
        site = Site(facts, len(self.sites), self.registry, layers, raw, observed)
        self.sites.append(site)
        self.registry.share_input(SharedInput(facts.consumers, site.other_readers))
        for layer in layers:
            self.reasons.pop(layer.name, None)
        return site

    # --- activations ----------------------------------------------------------------------------

    def activations(self) -> None:
        parents: dict[int, nn.Module] = {}
        for layer in self.registry:
            parent = self.model.get_submodule(layer.name.rpartition(".")[0])
            parents[id(parent)] = parent
        for parent in parents.values():
            self._trace(parent)

    def _trace(self, parent: nn.Module) -> None:
        name = self.names[id(parent)]
        graph = trace_forward(parent)
        if isinstance(graph, str):
            for layer in parent.children():
                if isinstance(layer, RoutedLinear):
                    self.reasons[layer.name] = f"{type(parent).__qualname__} {graph}"
            return
        sites = {}
        for cone in find_cones(parent, graph):
            if isinstance(cone, str):
                self.reasons[cone.split(" ", 1)[0]] = cone
                continue
            site, order = self._activation_site(name, parent, cone)
            sites[cone.root] = (site, tuple(cone.inputs[i] for i in order))
        proved = {
            root: entry for root, entry in sites.items() if entry[0].facts.semantics is not None
        }
        if proved:
            self.replacements.append((parent, replace_cones(parent, graph, proved).forward))

    def _activation_site(
        self, parent_name: str, parent: nn.Module, cone: Cone
    ) -> tuple[Site, tuple[int, ...]]:
        layer = cone.consumer
        finding, order = identify_activation(
            cone.function, len(cone.inputs), layer.dtype, layer.device
        )
        facts = SiteFacts(
            name=f"{parent_name}.{finding.semantics or cone.root.name}".lstrip("."),
            kind="activation",
            semantics=finding.semantics,
            reason=finding.reason,
            columns=layer.in_features,
            dtype=layer.dtype,
            consumers=(layer.name,),
            other_readers=tuple(f"{reader} in {parent_name}" for reader in cone.other_readers),
        )
        observed = {f"{parent_name}.{name}": module for name, module in cone.modules.items()}
        raw = partial(_reordered, cone.function, order)
        return self.add_site(facts, (layer,), raw, observed), order

    # --- norms ----------------------------------------------------------------------------------

    def norms(self, readings: tuple[Reading, ...]) -> None:
        sited = {name for site in self.sites for name in site.facts.consumers}
        by_origin: dict[str, list[Reading]] = defaultdict(list)
        for reading in readings:
            if not sited.isdisjoint(layer.name for layer in reading.linears):
                continue
            if reading.origin:
                by_origin[reading.origin].append(reading)
            else:
                self._no_site(tuple(reading.linears), "")
        for origin, group in by_origin.items():
            layers = {layer.name: layer for reading in group for layer in reading.linears}
            self._norm_site(origin, group, tuple(layers.values()))

    def _norm_site(
        self, origin: str, group: list[Reading], layers: tuple[RoutedLinear, ...]
    ) -> None:
        module = self.model.get_submodule(origin)
        composite = next(module.children(), None) is not None
        if composite or isinstance(module, RoutedLinear) or not list(module.parameters()):
            self._no_site(layers, origin)
        else:
            self._add_norm(origin, module, group, layers)

    def _no_site(self, layers: tuple[RoutedLinear, ...], origin: str) -> None:
        for layer in layers:
            parent = layer.name.rpartition(".")[0]
            maker = origin or (f"an op in {parent}" if parent else "an op of the model itself")
            known = self.reasons.get(layer.name)
            reason = f"its input is made by {maker}"
            self.reasons[layer.name] = f"{reason}; {known}" if known else reason

    def _add_norm(
        self,
        origin: str,
        module: nn.Module,
        group: list[Reading],
        layers: tuple[RoutedLinear, ...],
    ) -> None:
        value = group[0].value
        finding = identify_norm(module, value.shape[-1], value.dtype)
        seen_once = len(group) == 1
        others = tuple(dict.fromkeys(other for reading in group for other in reading.others))
        passed = {name: m for reading in group for name, m in reading.passed.items()}
        facts = SiteFacts(
            name=origin,
            kind="norm",
            semantics=finding.semantics if seen_once else None,
            reason=finding.reason if seen_once else f"{origin} runs more than once a forward",
            columns=value.shape[-1],
            dtype=value.dtype,
            consumers=tuple(layer.name for layer in layers),
            other_readers=others,
        )
        observed = {
            name: m
            for name, m in {origin: module, **passed}.items()
            if not isinstance(m, RoutedLinear)
        }
        semantics = facts.semantics
        raw = partial(norm_raw, semantics) if isinstance(semantics, NormSemantics) else None
        site = self.add_site(facts, layers, raw, observed)
        if raw is not None:
            self.replacements.append((module, _NormForward(site, module)))

    # --- placing --------------------------------------------------------------------------------

    def discovery(self) -> Discovery:
        unsited = tuple(Unsited(layer, reason) for layer, reason in self.reasons.items())
        return Discovery(tuple(self.sites), unsited, self._install, self._uninstall)

    def _install(self) -> None:
        for module, forward in self.replacements:
            vars(module)["forward"] = forward
        for site in self.sites:
            for name, module in site.observed.items():
                self.registry.watch(module, name)

    def _uninstall(self) -> None:
        for module, _ in self.replacements:
            vars(module).pop("forward", None)
        for site in self.sites:
            for module in site.observed.values():
                unwatch_hooks(module)


class _NormForward:
    """The forward of a norm whose site decides: (x) to what its linears take."""

    def __init__(self, site: Site, module: nn.Module) -> None:
        self._site = site
        self._module = module

    def __call__(self, x: torch.Tensor) -> Any:
        return self._site(x, self._module.weight)


def _reordered(
    function: Callable[..., torch.Tensor], order: tuple[int, ...], *inputs: torch.Tensor
) -> torch.Tensor:
    arguments: list[Any] = [None] * len(inputs)
    for position, value in zip(order, inputs, strict=True):
        arguments[position] = value
    return function(*arguments)


def discover(
    model: nn.Module, registry: LayerRegistry, inputs: Mapping[str, torch.Tensor]
) -> Discovery:
    """Find every site of `model`, whose linears are routed already (unquantised still).

    Args:
        model: in eval mode.
        registry: its linears.
        inputs: example inputs, batch first, two rows or more.

    Returns:
        the sites; nothing is replaced before `install` is called.  Each layer's `row_layout` is
        set on the way.
    """
    found = _Discoverer(model, registry)
    recording = record(model, inputs)
    layouts = row_layouts(model, inputs, recording)
    for layer in registry:
        layer.row_layout = layouts.get(layer.name, RowLayout.UNKNOWN)
        if layer.name not in recording.inputs:
            found.reasons[layer.name] = "it did not run in the recorded forward"
    found.activations()
    found.norms(recording.readings)
    return found.discovery()
