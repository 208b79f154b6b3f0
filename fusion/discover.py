"""Finding the sites of a model, and putting them in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ..core.oracle import ActivationSemantics, NormSemantics, Semantics
from ..linear.batch import BarePlan, Batch, BatchScope
from ..linear.branching import RowLayout
from ..linear.experts.layer import ExpertsLinear
from ..linear.hooks import hooks_suspended, unwatch_hooks
from ..linear.probing import probing
from ..linear.registry import LayerRegistry, SharedInput
from ..linear.routed import RoutedLinear
from ..linear.router import holds_router, products
from .experts import ExpertsSite, RoutedExperts
from .forwards import NormForward, OwnCone, TracedForward
from .identify import PROBE_ERRORS, identify_norm, same_bytes
from .identify.alike import Proofs
from .raw import compute_raw
from .record import Reading, Recording, masked_readers, record, row_layouts
from .site import Site, SiteFacts
from .trace import Cone, Untraceable, find_cones, replace_cones, trace_forward


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
        row_layouts: by module, where its input keeps the batch's rows: of linears, and of other
            modules with weights and without children that take one tensor.
        routers: names of modules that multiply with a weight of their own once a forward, as
            routers do.
    """

    sites: tuple[Site, ...]
    unsited: tuple[Unsited, ...]
    install: Callable[[], None]
    uninstall: Callable[[], None]
    row_layouts: Mapping[str, RowLayout]
    routers: frozenset[str] = frozenset()


class _Discoverer:
    def __init__(
        self,
        model: nn.Module,
        registry: LayerRegistry,
        recording: Recording,
        layouts: Mapping[str, RowLayout],
    ) -> None:
        self.model = model
        self.layouts = layouts
        self.registry = registry
        self.recording = recording
        self.names = {id(module): name for name, module in model.named_modules()}
        self.sites: list[Site] = []
        self.reasons: dict[str, str] = {}
        self.proofs = Proofs()
        self.replacements: list[tuple[nn.Module, Callable[..., Any]]] = []
        self.between: list[tuple[RoutedExperts, ExpertsSite]] = []

    def add_site(
        self, facts: SiteFacts, layers: tuple[RoutedLinear, ...], raw: Any, observed: Any
    ) -> Site:
        site = Site(facts, len(self.sites), self.registry, layers, raw, observed)
        self._enter(site)
        return site

    def _enter(self, site: Site) -> None:
        facts = site.facts
        self.sites.append(site)
        maker = facts.name if facts.kind == "norm" else ""
        self.registry.share_input(SharedInput(facts.consumers, site.other_readers, maker))
        for layer in site.layers:
            self.reasons.pop(layer.name, None)

    # --- activations ----------------------------------------------------------------------------

    def activations(self) -> None:
        parents: dict[int, nn.Module] = {}
        for layer in self.registry.linears:
            parent = self.model.get_submodule(layer.name.rpartition(".")[0])
            parents[id(parent)] = parent
        for parent in parents.values():
            self._trace(parent, self.names[id(parent)])

    def _trace(self, parent: nn.Module, name: str) -> None:
        given = self.recording.only_tensor(name)
        graph = trace_forward(parent)
        reason = f"cannot be traced: it {given}" if isinstance(given, str) else graph
        if isinstance(reason, str) or isinstance(graph, str) or isinstance(given, str):
            for layer in parent.children():
                if isinstance(layer, RoutedLinear):
                    self.reasons[layer.name] = f"{type(parent).__qualname__} {reason}"
            return
        cones = find_cones(parent, graph)
        sites = [self._activation_site(name, cone) for cone in cones if isinstance(cone, Cone)]
        for cone in cones:
            if isinstance(cone, Untraceable):
                self.reasons[cone.layer] = cone.reason
        proved = [entry for entry in sites if entry[1].facts.semantics is not None]
        if not proved:
            return
        # The definition of an activation may differ from torch's bytes where those depend on an
        # element's place.  The trace may not: it is compared with cones that compute their own.
        own = [(cone, OwnCone(cone, inputs), inputs) for cone, _, inputs in proved]
        if self._same_output(parent, replace_cones(parent, graph, own).forward, given):
            forward = replace_cones(parent, graph, proved).forward
            cones_and_sites = [(cone, site) for cone, site, _ in proved]
            self.replacements.append((parent, TracedForward(parent, forward, cones_and_sites)))
            return
        # A trace follows Python once; whatever it missed, the module's own forward stays.
        for _, site, _ in proved:
            reason = f"the traced forward of {name} computes something else than its own"
            site.facts = replace(site.facts, semantics=None, reason=reason)

    def _same_output(
        self, parent: nn.Module, forward: Callable[..., Any], given: torch.Tensor
    ) -> bool:
        unfused = BarePlan((0,) * len(self.sites), (False,) * len(self.registry))
        with torch.no_grad(), BatchScope(self.registry.owner, Batch(unfused)):
            try:
                ours = forward(given.clone())
            except PROBE_ERRORS:
                return False
            theirs = parent.forward(given.clone())
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            return False
        return ours.shape == theirs.shape and bool(same_bytes(ours, theirs).all())

    def _activation_site(self, parent: str, cone: Cone) -> tuple[Cone, Site, list[fx.Node]]:
        layer = cone.consumers[0]
        finding, order = self.proofs.of(cone, layer)
        semantics = finding.semantics
        facts = SiteFacts(
            name=f"{parent}.{_activation_name(semantics, cone)}".lstrip("."),
            kind="activation",
            semantics=semantics,
            reason=finding.reason,
            columns=layer.in_features,
            dtype=layer.dtype,
            consumers=tuple(consumer.name for consumer in cone.consumers),
            other_readers=tuple(f"{reader} in {parent}" for reader in cone.other_readers),
        )
        observed = {f"{parent}.{name}": module for name, module in cone.modules.items()}
        raw = None if semantics is None else partial(compute_raw, semantics)
        site = self.add_site(facts, cone.consumers, raw, observed)
        return cone, site, [cone.inputs[i] for i in order]

    # --- experts --------------------------------------------------------------------------------

    def experts(self) -> None:
        for module in self.model.modules():
            if isinstance(module, RoutedExperts):
                up, down = module.up, module.down
                site = module.make_site(
                    partial(self._add_experts_site, down, module.own_activation.modules),
                    self._experts_per_token(module.name),
                )
                self.between.append((module, site))
                self.reasons[up.name] = f"its router reads the input of {module.name} raw as well"

    def _experts_per_token(self, name: str) -> int:
        """How many experts each token was given to in the recorded forward."""
        calls = self.recording.calls.get(name, [])
        given = [value for args, kwargs in calls for value in (*args, *kwargs.values())]
        chosen = [v for v in given if isinstance(v, torch.Tensor) and not v.is_floating_point()]
        return chosen[0].shape[-1] if chosen else 1

    def _add_experts_site(
        self, down: ExpertsLinear, modules: Mapping[str, nn.Module], facts: SiteFacts, raw: Any
    ) -> ExpertsSite:
        observed = {f"{facts.name.rpartition('.')[0]}.{name}": m for name, m in modules.items()}
        site = ExpertsSite(facts, len(self.sites), self.registry, (down,), raw, observed)
        self._enter(site)
        return site

    # --- norms ----------------------------------------------------------------------------------

    def norms(self) -> None:
        sited = {name for site in self.sites for name in site.facts.consumers}
        for reading in self.recording.readings:
            layers = tuple(dict.fromkeys(reading.linears))
            if not sited.isdisjoint(layer.name for layer in layers):
                continue
            module = self.model.get_submodule(reading.origin) if reading.origin else None
            composite = module is not None and next(module.children(), None) is not None
            if module is None or composite or not _has_own_weight(module):
                self._no_site(layers, reading.origin)
            else:
                self._add_norm(reading, module, layers)

    def _no_site(self, layers: tuple[RoutedLinear, ...], origin: str) -> None:
        for layer in layers:
            parent = layer.name.rpartition(".")[0]
            maker = origin or (f"an op in {parent}" if parent else "an op of the model itself")
            known = self.reasons.get(layer.name)
            reason = f"its input is made by {maker}"
            self.reasons[layer.name] = f"{reason}; {known}" if known else reason

    def _add_norm(
        self, reading: Reading, module: nn.Module, layers: tuple[RoutedLinear, ...]
    ) -> None:
        value, origin = reading.value, reading.origin
        finding = identify_norm(module, value.shape[-1], value.dtype)
        given = self.recording.only_tensor(origin)
        obstacle = f"{origin} {given}" if isinstance(given, str) else finding.reason
        if "forward" in vars(module):
            obstacle = f"the forward of {origin} was patched onto the object"
        facts = SiteFacts(
            name=origin,
            kind="norm",
            semantics=None if obstacle else finding.semantics,
            reason=obstacle,
            columns=value.shape[-1],
            dtype=value.dtype,
            consumers=tuple(layer.name for layer in layers),
            other_readers=tuple(dict.fromkeys(reading.others)),
        )
        observed = {
            name: m
            for name, m in {origin: module, **reading.passed}.items()
            if not isinstance(m, RoutedLinear)
        }
        semantics = facts.semantics
        raw = partial(compute_raw, semantics) if isinstance(semantics, NormSemantics) else None
        site = self.add_site(facts, layers, raw, observed)
        if raw is not None:
            forward = NormForward(site, module)
            site.vectors = forward.vectors
            self.replacements.append((module, forward))

    # --- placing --------------------------------------------------------------------------------

    def discovery(self) -> Discovery:
        unsited = tuple(Unsited(layer, reason) for layer, reason in self.reasons.items())
        routers = self._routers()
        # Its tensors would live as long as what installs and uninstalls.
        del self.recording
        return Discovery(
            tuple(self.sites), unsited, self._install, self._uninstall, self.layouts, routers
        )

    def _routers(self) -> frozenset[str]:
        if not any(isinstance(module, RoutedExperts) for module in self.model.modules()):
            return frozenset()
        held = {n: m for n, m in self.model.named_modules() if holds_router(m)}
        return frozenset(name for name, module in held.items() if self._multiplies(name, module))

    def _multiplies(self, name: str, module: nn.Module) -> bool:
        """Whether a module multiplied with its weight once, in the one call that was recorded."""
        calls = self.recording.calls.get(name, [])
        if len(calls) != 1 or not calls[0][0] or not isinstance(calls[0][0][0], torch.Tensor):
            return False
        try:
            with probing():
                return products(module, *calls[0]) == 1
        except PROBE_ERRORS:
            # It cannot be called twice alike: whatever it is, it stays the model's own.
            return False

    def _install(self) -> None:
        for module, forward in self.replacements:
            vars(module)["forward"] = forward
        for experts, site in self.between:
            experts.place(site)
        for site in self.sites:
            for name, module in site.observed.items():
                self.registry.watch(module, name)
            # Whoever else reads the activation might write to it.
            if not site.facts.other_readers:
                for layer in site.linears:
                    layer.siblings = site.linears

    def _uninstall(self) -> None:
        for module, _ in self.replacements:
            vars(module).pop("forward", None)
        for experts, _ in self.between:
            experts.place(None)
        for site in self.sites:
            for module in site.observed.values():
                unwatch_hooks(module)
            for layer in site.linears:
                layer.siblings = ()


def _activation_name(semantics: Semantics | None, cone: Cone) -> str:
    if not isinstance(semantics, ActivationSemantics):
        return cone.root.name
    if not semantics.custom:
        return str(semantics)
    return f"{cone.title}_mul" if semantics.gated else cone.title


def _has_own_weight(module: nn.Module) -> bool:
    return not isinstance(module, RoutedLinear) and next(module.parameters(), None) is not None


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

    Raises:
        WrapError: the model cannot run on the inputs.
    """
    # Foreign hooks must see no probe, and change none.
    with hooks_suspended(model):
        return _discover(model, registry, inputs)


def _discover(
    model: nn.Module, registry: LayerRegistry, inputs: Mapping[str, torch.Tensor]
) -> Discovery:
    for layer in registry:
        layer.weight_was_read = False
    recording = record(model, inputs)
    layouts = row_layouts(model, inputs, recording)
    for origin, others in masked_readers(model, inputs).items():
        for reading in recording.readings:
            if reading.origin == origin:
                reading.others += others
    found = _Discoverer(model, registry, recording, layouts)
    for layer in registry:
        ran = layer.experts_name if isinstance(layer, ExpertsLinear) else layer.name
        layer.row_layout = layouts.get(ran, RowLayout.UNKNOWN)
        if ran not in recording.inputs:
            found.reasons[layer.name] = "it did not run in the recorded forward"
    found.activations()
    found.experts()
    found.norms()
    return found.discovery()
