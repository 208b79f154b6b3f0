"""The experts of one layer: two grouped matmuls, and a site between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.oracle import ActivationSemantics
from ..core.quantized_activation import QuantizedActivation
from ..core.route import Route
from ..linear import ops
from ..linear.branching import BatchSource
from ..linear.experts.form import ExpertsForm
from ..linear.experts.layer import ExpertsLinear
from ..linear.experts.pairs import Pairs, combine
from ..linear.experts.rows import PairRows
from ..linear.hooks import hook_names
from ..linear.outputs import RawRequest
from ..linear.parts import READS_RAW
from .identify import identify_activation
from .identify.finding import Finding
from .producers.base import Emission
from .raw import compute_raw
from .site import Site, SiteFacts


class ExpertsSite(Site):
    """The activation between two grouped matmuls, whose rows are pairs.

    Who reads raw is decided pair by pair: an adapter on the second projection needs the raw rows
    of the pairs whose token has that adapter, and of no others.
    """

    def between(self, rows: PairRows, *inputs: torch.Tensor) -> torch.Tensor | QuantizedActivation:
        """The activation of (gate, up) or (x,), each (P, I) by position, as the plan says."""
        plan = rows.batch.plan
        if plan.routes[self.index] == Route.UNFUSED or not len(rows.pairs):
            self.counters.count(Route.UNFUSED)
            return self.compute_raw(*inputs)
        return self.produce_emission(rows.batch, self._emission_of(rows), inputs)

    def _emission_of(self, rows: PairRows) -> Emission:
        (down,) = self.layers
        plan, index = rows.batch.plan, down.index
        route = Route(plan.routes[self.index])
        name = self.facts.name
        if route not in (Route.DUAL, Route.ABSORBED) or not plan.parts[index] & READS_RAW:
            return Emission(self.contract, route, name)
        assert isinstance(down, ExpertsLinear)
        assert down.branch is not None
        if route == Route.DUAL:
            wanted = rows.slots(index) >= 0
            return Emission(
                self.contract, route, name, RawRequest(wanted, compact=down.branch.compact_raw)
            )
        request = down.branch.shrink_request(rows, index, plan.shrink_ranks[index])
        return Emission(self.contract, route, name, shrinks=(request,))


@dataclass(frozen=True, eq=False)
class Gate:
    """What lies between the projections, by the model's own code.

    Attributes:
        original: the model's experts.
        form: how they compute.
    """

    original: Any
    form: ExpertsForm

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        """(P, N) of the first projection, gates before ups, to (P, I)."""
        if not self.form.gated:
            return self.original.act_fn(out)
        if self.form.interleaved:
            out = torch.stack(out.chunk(2, -1), -1).flatten(-2)
        return self.original._apply_gate(out)

    def of_two(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The same of (gate, up) or (x,), of any leading dimensions."""
        return self(torch.cat(inputs, -1))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What it calls, by its name in the experts."""
        return dict(self.original.named_children())

    def identified(self, dtype: torch.dtype, device: torch.device) -> Finding:
        """What it computes, proved on probes."""
        arity = 2 if self.form.gated else 1
        parts = (self.original, *self.modules.values())
        numbers = [
            float(value)
            for part in parts
            for value in vars(part).values()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        finding, order = identify_activation(self.of_two, arity, dtype, device, numbers)
        if finding.semantics is not None and order != tuple(range(arity)):
            return Finding(None, "its gates lie where ups do in other experts")
        return finding


class RoutedExperts(nn.Module):
    """The experts of one layer, in the place of the model's own.

    Args:
        name: full name in the model.
        form: how they compute.
        up: the first projection.
        down: the second one.
        original: the model's own module: the norm after the experts is its.
        gate: what lies between.
        source: answers for the batch in flight.
        partial: some experts are on other ranks; the router says so by numbers beyond [0, E).
    """

    def __init__(
        self,
        name: str,
        form: ExpertsForm,
        up: ExpertsLinear,
        down: ExpertsLinear,
        original: nn.Module,
        source: BatchSource,
        *,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.form = form
        self.add_module(form.up_name, up)
        self.add_module(form.down_name, down)
        self.gate = Gate(original, form)
        self.partial = partial
        # In tuples, so that they do not become children.
        self._projections = (up, down)
        self._original: tuple[Any] = (original,)
        self._source = source
        self._site: tuple[ExpertsSite | None] = (None,)
        self.handle = ops.register(self)

    @property
    def up(self) -> ExpertsLinear:
        """The first projection."""
        return self._projections[0]

    @property
    def down(self) -> ExpertsLinear:
        """The second projection."""
        return self._projections[1]

    @property
    def original(self) -> Any:
        """The model's own module, whose parameters may lie on the meta device."""
        return self._original[0]

    @property
    def num_experts(self) -> int:
        """E, which some model code asks for."""
        return self.form.experts

    @property
    def site(self) -> ExpertsSite | None:
        """The activation between the projections, once it was identified."""
        return self._site[0]

    def make_site(
        self, add: Callable[[SiteFacts, Callable[..., torch.Tensor] | None], ExpertsSite]
    ) -> None:
        """Identify the activation; `add` enters its site.

        The model's own code stays in place where what it computes is not known.
        """
        down = self.down
        finding = self.gate.identified(down.dtype, down.device)
        semantics = finding.semantics
        known = isinstance(semantics, ActivationSemantics)
        facts = SiteFacts(
            name=f"{self.name}.{semantics if known and not semantics.custom else 'act_fn'}",
            kind="activation",
            semantics=semantics,
            reason=finding.reason,
            columns=down.in_features,
            dtype=down.dtype,
            consumers=(down.name,),
        )
        self._site = (add(facts, partial(compute_raw, semantics) if known else None),)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """What the chosen experts make of each token, weighted and added up.

        Args:
            hidden_states: (T, H).
            top_k_index: (T, k), integers: the chosen experts.
            top_k_weights: (T, k): their weights.

        Returns:
            (T, H) in the dtype of `hidden_states`.
        """
        if torch.compiler.is_compiling():
            return ops.routed_experts(hidden_states, top_k_index, top_k_weights, self.handle)
        return self.run(hidden_states, top_k_index, top_k_weights)

    def run(
        self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The forward outside of a compiled graph."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        pairs = Pairs.of(index, self.form.experts, partial=self.partial)
        rows = PairRows.of(
            self._source.current_batch(), pairs, flat.shape, f"experts '{self.name}'"
        )
        out = self.down(self._between(self.up(flat, rows), rows), rows)
        if self.form.post_norm:
            out = self.original.post_expert_norm(out)
        total = combine(out, weights, pairs)
        return total.to(hidden_states.dtype).view(hidden_states.shape)

    def _between(self, out: torch.Tensor, rows: PairRows) -> torch.Tensor | QuantizedActivation:
        site = self.site
        if site is None or site.facts.semantics is None:
            return self.gate(out)
        hooked = next((name for name, m in self.gate.modules.items() if hook_names(m)), None)
        if hooked is not None:
            site.counters.fall_back(f"{hooked} carries a foreign hook")
            site.counters.count(Route.UNFUSED)
            return self.gate(out)
        inputs = out.chunk(2, -1) if self.form.gated else (out,)
        return site.between(rows, *inputs)

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        return f"experts={self.form.experts}, hidden={self.form.hidden}"
