"""Sites: the ops whose output feeds linears, and how they run one batch's route."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from ..core.oracle import Semantics
from ..core.quant_key import QuantKey
from ..core.quantized_activation import QuantizedActivation
from ..core.route import Route
from ..linear import ops
from ..linear.batch import BatchPlan
from ..linear.contract import InputContract
from ..linear.hooks import hook_names
from ..linear.registry import LayerRegistry, RawReader
from ..linear.routed import RoutedLinear
from .producers.base import Emission, Producer
from .producers.eager import EAGER


@dataclass(frozen=True)
class SiteFacts:
    """What was found out about a site; changes only when the model is wrapped again.

    Attributes:
        name: where it is, such as "model.layers.0.input_layernorm".
        kind: "activation" or "norm".
        semantics: what it computes, proved on probes; None where nothing known equals it.
        reason: why `semantics` is None; empty otherwise.
        columns: last dimension of its output.
        dtype: dtype of its output.
        consumers: names of the routed linears that read its output.
        other_readers: whatever else was seen reading it ("Tensor.view in model.layers.0.mlp").
    """

    name: str
    kind: str
    semantics: Semantics | None
    reason: str
    columns: int
    dtype: torch.dtype
    consumers: tuple[str, ...]
    other_readers: tuple[str, ...] = ()


class ProducerPlan(BatchPlan, Protocol):
    """What a site reads of a plan."""

    @property
    def producers(self) -> tuple[Producer | None, ...]:
        """The chosen producer by site index; None where the route is unfused."""
        ...


class RouteCounters:
    """What really ran at one site, by route, and why a planned producer was passed over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: Counter[Route] = Counter()
        self._fallbacks: Counter[str] = Counter()

    def count(self, route: Route) -> None:
        """One call took `route`."""
        with self._lock:
            self._routes[route] += 1

    def fall_back(self, reason: str) -> None:
        """One call used the eager definition because the planned producer refused the tensors."""
        with self._lock:
            self._fallbacks[reason] += 1

    def routes(self) -> dict[Route, int]:
        """Calls by route."""
        with self._lock:
            return dict(self._routes)

    def fallbacks(self) -> dict[str, int]:
        """Calls by reason for not using the planned producer."""
        with self._lock:
            return dict(self._fallbacks)

    def reset(self) -> None:
        """Start from zero."""
        with self._lock:
            self._routes.clear()
            self._fallbacks.clear()


class Site(nn.Module):
    """One site at run time: reads its route from the batch's plan, and follows it.

    Args:
        facts: what it is.
        index: its place in every plan.
        registry: answers for the batch in flight.
        layers: the linears it feeds.
        raw: computes the raw activation from the site's inputs; None for a site that was found
            but whose semantics are unknown, so that it is never put in place.
        observed: modules whose foreign forward hooks read (or would miss) the activation, by name.
    """

    def __init__(
        self,
        facts: SiteFacts,
        index: int,
        registry: LayerRegistry,
        layers: tuple[RoutedLinear, ...],
        raw: Callable[..., torch.Tensor] | None,
        observed: dict[str, nn.Module],
    ) -> None:
        super().__init__()
        self.facts = facts
        self.index = index
        self.counters = RouteCounters()
        self._raw = raw
        self._registry = registry
        # Tuples, so that the model's modules do not become children of this one.
        self.layers = layers
        self._observed = tuple(observed.items())
        self.handle = ops.register(self)

    @property
    def contract(self) -> InputContract:
        """What the consumers take; meaningful where they all take the same."""
        return self.layers[0].kernel.contract

    def common_key(self) -> QuantKey | None:
        """The key that all consumers take; None where they take no codes, or not the same."""
        keys = {layer.kernel.contract.key for layer in self.layers}
        return keys.pop() if len(keys) == 1 else None

    def other_readers(self) -> tuple[RawReader, ...]:
        """Readers that are no branch and sit on no linear: foreign hooks on the way, and ops."""
        hooks = (
            RawReader("hook", hook, name)
            for name, module in self._observed
            for hook in hook_names(module)
        )
        unknown = (RawReader("unknown", who, self.facts.name) for who in self.facts.other_readers)
        return (*hooks, *unknown)

    @property
    def observed(self) -> dict[str, nn.Module]:
        """Modules whose hooks count as readers."""
        return dict(self._observed)

    def compute_raw(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The raw activation, as the unfused route writes it."""
        assert self._raw is not None
        return self._raw(*inputs)

    def forward(
        self, *inputs: torch.Tensor
    ) -> torch.Tensor | QuantizedActivation | ops.TracedActivation:
        """The raw activation or the codes, as this batch's plan says."""
        if torch.compiler.is_compiling():
            return self._traced(inputs)
        plan = cast(ProducerPlan, self._registry.current_batch().plan)
        if plan.routes[self.index] == Route.UNFUSED:
            self.counters.count(Route.UNFUSED)
            return self.compute_raw(*inputs)
        return self.produce(plan, inputs)

    def produce(self, plan: ProducerPlan, inputs: tuple[torch.Tensor, ...]) -> QuantizedActivation:
        """By the planned producer or, where it refuses these tensors, by the oracle."""
        producer, route = plan.producers[self.index], plan.routes[self.index]
        assert producer is not None
        assert self.facts.semantics is not None
        verdict = producer.accepts(inputs)
        if not verdict.ok:
            self.counters.fall_back(f"{producer.name}: {verdict.reason}")
            producer = EAGER
        emission = Emission(self.contract, Route(route), self.facts.name)
        out = producer.produce(self.facts.semantics, inputs, emission)
        self.counters.count(Route(route))
        return out

    def _traced(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | ops.TracedActivation:
        if self.contract.scale is None:
            return _site_raw_op(list(inputs), self.handle)
        raw, codes = _site_op(list(inputs), self.handle)
        return ops.TracedActivation(raw, codes, self.index)


@torch.library.custom_op("branchline::site", mutates_args=())
def _site_op(inputs: list[torch.Tensor], handle: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = ops.resolve(handle)(*inputs)
    if isinstance(out, QuantizedActivation):
        unwritten = torch.empty(out.orig_shape, dtype=out.orig_dtype, device=out.device)
        return (unwritten if out.raw is None else out.raw), out.codes
    return out, torch.empty(out.shape, dtype=torch.float8_e4m3fn, device=out.device)


@_site_op.register_fake
def _(inputs: list[torch.Tensor], handle: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = inputs[0]
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.float8_e4m3fn)


@torch.library.custom_op("branchline::site_raw", mutates_args=())
def _site_raw_op(inputs: list[torch.Tensor], handle: int) -> torch.Tensor:
    return ops.resolve(handle)(*inputs).clone()


@_site_raw_op.register_fake
def _(inputs: list[torch.Tensor], handle: int) -> torch.Tensor:
    return torch.empty_like(inputs[0])
