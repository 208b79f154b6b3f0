"""Sites: the ops whose output feeds linears, and how they run one batch's route."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from ..core.errors import ContractError
from ..core.oracle import Semantics
from ..core.quant_key import QuantKey
from ..core.quantized_activation import QuantizedActivation
from ..core.route import Route
from ..linear import ops
from ..linear.batch import Batch, BatchPlan
from ..linear.contract import InputContract
from ..linear.hooks import hook_names
from ..linear.kernels.base import LinearKernel
from ..linear.kernels.native_fp8 import group_siblings
from ..linear.module_place import ModulePlace
from ..linear.outputs import RawRequest
from ..linear.parts import READS_RAW
from ..linear.registry import LayerRegistry, RawReader
from ..linear.routed import RoutedLayer, RoutedLinear
from .producers.base import Emission, Producer
from .producers.eager import EAGER
from .traced import received, traced_site


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
        rows_per_token: rows that a token has there: of experts, one for each that it is given to.
    """

    name: str
    kind: str
    semantics: Semantics | None
    reason: str
    columns: int
    dtype: torch.dtype
    consumers: tuple[str, ...]
    other_readers: tuple[str, ...] = ()
    rows_per_token: int = 1


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
        self._planned: Counter[Route] = Counter()
        self._fallbacks: Counter[str] = Counter()

    def count(self, route: Route, planned: Route | None = None) -> None:
        """One call took `route`; `planned` where its plan said another one."""
        with self._lock:
            self._routes[route] += 1
            self._planned[planned or route] += 1

    def fall_back(self, reason: str) -> None:
        """One call used the eager definition because the planned producer refused the tensors."""
        with self._lock:
            self._fallbacks[reason] += 1

    def routes(self) -> dict[Route, int]:
        """Calls by route."""
        with self._lock:
            return dict(self._routes)

    def planned(self) -> dict[Route, int]:
        """Calls by the route that their plan said."""
        with self._lock:
            return dict(self._planned)

    def fallbacks(self) -> dict[str, int]:
        """Calls by reason for not using the planned producer."""
        with self._lock:
            return dict(self._fallbacks)

    def reset(self) -> None:
        """Start from zero."""
        with self._lock:
            self._routes.clear()
            self._planned.clear()
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
        layers: tuple[RoutedLayer, ...],
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
        self._grouped: list[LinearKernel] = []
        #: What a norm's site is handed beside the activation: (weight,) or (weight, bias).
        self.vectors: Callable[[], tuple[torch.Tensor, ...]] = tuple
        #: The norm that it is computed in the place of, where that takes adapters.
        self.maker: ModulePlace | None = None
        self.handle = ops.register(self)

    @property
    def linears(self) -> tuple[RoutedLinear, ...]:
        """Those of `layers` that are linears of their own, and no projections of experts."""
        return tuple(layer for layer in self.layers if isinstance(layer, RoutedLinear))

    @property
    def contract(self) -> InputContract:
        """What the consumers take; meaningful where they all take the same."""
        return self.layers[0].kernel.contract

    def group_kernels(self) -> None:
        """Let consumers that take the same codes be multiplied in one call."""
        kernels = [layer.kernel for layer in self.linears]
        if kernels != self._grouped:
            group_siblings(kernels)
            self._grouped = kernels

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

    def own_rows_of(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As `own_rows`, for the batch in flight."""
        return self.own_rows(out, x, self._registry.current_batch())

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
        """The raw activation, or what a producer emits, as this batch's plan says."""
        if torch.compiler.is_compiling():
            return traced_site(self, inputs)
        batch = self._registry.current_batch()
        plan = cast(ProducerPlan, batch.plan)
        if plan.routes[self.index] == Route.UNFUSED:
            self.counters.count(Route.UNFUSED)
            return self.own_rows(self.compute_raw(*inputs), inputs[0], batch)
        return self.produce(batch, inputs)

    def count_own_code(self, reason: str) -> None:
        """One call ran the model's own code, which computes the raw activation, and why."""
        planned = Route(self._registry.current_batch().plan.routes[self.index])
        self.counters.fall_back(reason)
        self.counters.count(Route.UNFUSED, planned)

    def own_rows(self, raw: torch.Tensor, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`raw`, made of `x`, with the rows of adapters that have weights of this norm."""
        return raw if self.maker is None else self.maker.filled(raw, x, batch)

    def produce(self, batch: Batch, inputs: tuple[torch.Tensor, ...]) -> QuantizedActivation:
        """By the planned producer or, where it refuses these tensors, by the oracle."""
        emission = self.emission(batch)
        if emission.raw is not None or emission.shrinks:
            for layer in self.layers:
                layer.refuse_misfit(inputs[0].shape, batch)
        return self.produce_emission(batch, emission, inputs)

    def produce_emission(
        self, batch: Batch, emission: Emission, inputs: tuple[torch.Tensor, ...]
    ) -> QuantizedActivation:
        """As `produce`, of an emission whose rows are known to be those of `inputs`."""
        out, refused = self.make(batch, emission, inputs)
        if refused:
            self.counters.fall_back(refused)
        self.counters.count(Route(batch.plan.routes[self.index]))
        return out

    def make(
        self, batch: Batch, emission: Emission, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[QuantizedActivation, str]:
        """What `produce` hands on, and why the planned producer was passed over; counts nothing.

        Raises:
            ContractError: no producer computes this of such tensors.
        """
        plan = cast(ProducerPlan, batch.plan)
        producer, semantics = plan.producers[self.index], self.facts.semantics
        assert producer is not None
        assert semantics is not None
        verdict, refused = producer.accepts(semantics, inputs, emission), ""
        if not verdict.ok:
            refused = f"{producer.name}: {verdict.reason}"
            producer = EAGER
            if not EAGER.accepts(semantics, inputs, emission).ok:
                raise ContractError(
                    f"site {self.facts.name}",
                    f"computes {semantics} of tensors it was not proved for: {verdict.reason}",
                    "keep the dtypes that the model was wrapped with",
                )
        out = producer.produce(semantics, inputs, emission).activation
        return (out.shared() if len(self.layers) > 1 else out), refused

    def emission(self, batch: Batch) -> Emission:
        """What this site emits in `batch`; the same object for all of its forwards."""
        found = batch.memo.sites.get(self.index)
        # A kernel may be replaced while a batch runs.
        if found is None or found.contract is not self.contract:
            found = batch.memo.sites[self.index] = self._emission(batch)
        return found

    def _emission(self, batch: Batch) -> Emission:
        plan = batch.plan
        route = Route(plan.routes[self.index])
        # Whoever takes other routes reads no raw row, or could not be served by these.
        if route not in (Route.DUAL, Route.ABSORBED):
            return Emission(self.contract, route, self.facts.name)
        assert batch.slots is not None
        slots = batch.slots
        reading = [layer for layer in self.layers if plan.parts[layer.index] & READS_RAW]
        branches = [(layer, layer.branch) for layer in reading if layer.branch is not None]
        if route == Route.DUAL:
            wanted = torch.stack([slots[layer.index] >= 0 for layer in reading]).any(0)
            raw = RawRequest(wanted, compact=all(branch.compact_raw for _, branch in branches))
            return Emission(self.contract, route, self.facts.name, raw)
        shrinks = tuple(
            branch.shrink_request(slots[layer.index], plan.shrink_ranks[layer.index])
            for layer, branch in branches
        )
        return Emission(self.contract, route, self.facts.name, shrinks=shrinks)

    def received(self, traced: ops.TracedActivation) -> torch.Tensor | QuantizedActivation:
        """What the consumers take of this site's outputs in a compiled graph."""
        return received(traced, self, self._registry.current_batch())

    @property
    def shrink_width(self) -> int:
        """Columns that a compiled graph keeps for the shrunk rows of each consumer."""
        return self._registry.rules.shrink_width
