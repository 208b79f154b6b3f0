"""The experts of one layer: two grouped matmuls, and a site between them."""

from __future__ import annotations

from collections.abc import Callable
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
from ..linear.experts.pairs import Pairs
from ..linear.experts.rows import PairRows
from ..linear.experts.shard import ExpertsShard
from ..linear.hooks import hook_names
from ..linear.outputs import RawRequest
from ..linear.parts import READS_RAW
from .identify import identify_activation
from .identify.finding import Finding
from .producers.base import Emission
from .raw import compute_raw
from .site import Site, SiteFacts
from .trace import Settings

#: What transformers calls the norm behind the second projection.
_POST_NORM = "post_expert_norm"


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
        return self.produce_emission(rows.batch, self.emission_of(rows), inputs)

    def emission_of(self, rows: PairRows) -> Emission:
        """What this site emits for these pairs."""
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


class OwnActivation:
    """What lies between the projections, by the model's own code.

    Args:
        original: the model's experts.
        form: how they compute.

    Attributes:
        modules: what it calls, by its name in the experts.
    """

    def __init__(self, original: Any, form: ExpertsForm) -> None:
        self._original = original
        self._form = form
        outside = {_POST_NORM} if form.post_norm else set()
        self.modules: dict[str, nn.Module] = {
            name: child for name, child in original.named_children() if name not in outside
        }
        self._settings = tuple(Settings(part) for part in (original, *self.modules.values()))
        self._code = self._own_code()

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        """(P, N) of the first projection, gates before ups, to (P, I)."""
        if not self._form.gated:
            return self._original.act_fn(out)
        if self._form.interleaved:
            out = torch.stack(out.chunk(2, -1), -1).flatten(-2)
        return self._original._apply_gate(out)

    def of_two(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The same of (gate, up) or (x,), of any leading dimensions."""
        return self(torch.cat(inputs, -1))

    def identified(self, dtype: torch.dtype, device: torch.device) -> Finding:
        """What it computes, proved on probes."""
        arity = 2 if self._form.gated else 1
        parts = (self._original, *self.modules.values())
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

    def change(self) -> str:
        """What is no longer as it was when it was identified; empty where all is."""
        held = self._original._modules
        for name, module in self.modules.items():
            if held.get(name) is not module:
                return f"{name} was replaced after wrapping"
            if hook_names(module):
                return f"{name} carries a foreign hook"
        if any(was is not now for was, now in zip(self._code, self._own_code(), strict=True)):
            return "the code between the projections was patched after wrapping"
        if not all(settings.hold() for settings in self._settings):
            return "the settings of the experts were changed after wrapping"
        return ""

    def _own_code(self) -> tuple[object, ...]:
        """Functions that were put onto the objects, and not on their classes."""
        forwards = (vars(module).get("forward") for module in self.modules.values())
        return (vars(self._original).get("_apply_gate"), *forwards)


class RoutedExperts(nn.Module):
    """The experts of one layer, in the place of the model's own.

    Args:
        name: full name in the model.
        form: how they compute.
        up: the first projection.
        down: the second one.
        original: the model's own module: the norm after the experts is its.
        source: answers for the batch in flight.
        shard: which experts are here, where others are on other ranks; None where all are.
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
        shard: ExpertsShard | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.form = form
        self.add_module(form.up_name, up)
        self.add_module(form.down_name, down)
        # What the model's own code calls keeps its names, and so do hooks on it.
        for child_name, child in original.named_children():
            self.add_module(child_name, child)
        self.own_activation = OwnActivation(original, form)
        self.shard = shard
        # In tuples, so that they do not become children.
        self._projections = (up, down)
        self._original: tuple[Any] = (original,)
        self._source = source
        self._site: tuple[ExpertsSite | None] = (None,)
        self.handle = ops.register(self)

    def __getattr__(self, name: str) -> Any:
        """What model code reads of its experts, such as a limit, is the original's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = vars(self).get("_original")
            if original is None or name.startswith("__"):
                raise
            return getattr(original[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is changed of the original's settings and modules is changed there."""
        held = vars(self).get("_original")
        original = None if held is None else held[0]
        own = name in vars(self) or hasattr(type(self), name)
        if original is None or own or not hasattr(original, name):
            super().__setattr__(name, value)
            return
        if name in self._modules:
            super().__setattr__(name, value)
        setattr(original, name, value)

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
        """The activation between the projections, once it was put in place."""
        return self._site[0]

    def place(self, site: ExpertsSite | None) -> None:
        """Let `site` compute the activation; None for the model's own code."""
        self._site = (site,)

    def make_site(
        self,
        add: Callable[[SiteFacts, Callable[..., torch.Tensor] | None], ExpertsSite],
        per_token: int,
    ) -> ExpertsSite:
        """Identify the activation; `add` enters its site, which is not put in place yet.

        `per_token` is how many experts a token is given to.

        The model's own code stays in place where what it computes is not known.
        """
        down = self.down
        finding = self.own_activation.identified(down.dtype, down.device)
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
            rows_per_token=per_token,
        )
        return add(facts, partial(compute_raw, semantics) if known else None)

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
        shard = self.shard
        if shard is not None:
            index = shard.local(index)
        pairs = Pairs.of(index, self.form.experts, partial=shard is not None)
        batch = self._source.current_batch()
        branches = batch.plan.branched
        rows = PairRows.of(
            batch,
            pairs,
            flat.shape,
            f"experts '{self.name}'",
            branched=branches[self.up.index] or branches[self.down.index],
        )
        out = self.down(self._between(self.up(flat, rows), rows), rows)
        if self.form.post_norm:
            out = getattr(self.original, _POST_NORM)(out)
        total = self.down.combine(out, weights, pairs)
        if shard is not None:
            total = shard.joined(total)
        return total.to(hidden_states.dtype).view(hidden_states.shape)

    def _between(self, out: torch.Tensor, rows: PairRows) -> torch.Tensor | QuantizedActivation:
        site = self.site
        if site is None or site.facts.semantics is None:
            return self.own_activation(out)
        change = self.own_activation.change()
        if change:
            # The linears of a module are fed raw then, which is always right.
            site.count_own_code(change)
            return self.own_activation(out)
        inputs = out.chunk(2, -1) if self.form.gated else (out,)
        return site.between(rows, *inputs)

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        return f"experts={self.form.experts}, hidden={self.form.hidden}"
