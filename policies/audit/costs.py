"""What adapters cost: sites they take out of the fused path, bytes, seconds, and what to do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...core.route import Route
from ...fusion.site import Site
from ..base import label_of
from ..plan import Plan
from ..planner import Planner
from ..policy import Policy, make_policy
from .report import AdapterCost, Advice, FleetReport, TargetCost
from .traffic import BatchTraffic, Load

#: What advice compares the policy in force with.
_ALTERNATIVES = ("dynamic", "dual", "absorbed")
#: Less of the traffic than this is not worth a line.
_WORTH_SAYING = 0.0005


@dataclass(frozen=True)
class TargetLoss:
    """What the branches on some target modules cost, all of them together.

    Attributes:
        sites: how many that are fused without them are not, or write more beside.
        moved: bytes a token that the batch moves more.
    """

    sites: int
    moved: float


@dataclass(frozen=True)
class ShapeCost:
    """What every adapter of one shape costs.

    Attributes:
        costs: by policy.
        advice: under the first one, what saves most first.
        losses: by the ends of the names of the modules that cause them.
    """

    costs: tuple[AdapterCost, ...]
    advice: tuple[Advice, ...]
    losses: Mapping[tuple[str, ...], TargetLoss]


@dataclass(frozen=True)
class _Batch:
    """One planned batch: what each site costs in it, and all of them together."""

    plan: Plan
    loads: tuple[Load, ...]

    @property
    def moved(self) -> float:
        return sum(load.moved for load in self.loads)

    @property
    def seconds(self) -> float:
        return sum(load.seconds for load in self.loads)


class CostBook:
    """What adapters cost, worked out once for all that touch the same places alike.

    Args:
        planner: makes the plans, the same objects that batches use.
        policies: to tell the costs under; advice is given under the first.
        traffic: counts bytes and seconds.
        tokens: of the batches that `traffic` counts.
    """

    def __init__(
        self, planner: Planner, policies: tuple[Policy, ...], traffic: BatchTraffic, tokens: int
    ) -> None:
        self._planner = planner
        self._policies = policies
        self._traffic = traffic
        self._tokens = tokens
        self._bases: dict[Policy, _Batch] = {}
        self._shapes: dict[int, ShapeCost] = {}

    def base_loads(self) -> tuple[Load, ...]:
        """What each site costs without adapters, under the first policy."""
        return self._base(self._policies[0]).loads

    @property
    def base_moved(self) -> float:
        """Bytes a token without adapters, under the first policy."""
        return self._base(self._policies[0]).moved / self._tokens

    def of(self, identity: int, name: str) -> ShapeCost:
        """What the adapter costs.

        Args:
            identity: of its version.
            name: of it, for plans.
        """
        layers = self._planner.registry.holding(identity).layers
        found = self._shapes.get(id(layers))
        if found is None:
            found = self._shapes[id(layers)] = self._work_out({identity: name})
        return found

    def _base(self, policy: Policy) -> _Batch:
        found = self._bases.get(policy)
        if found is None:
            found = self._bases[policy] = self._batch({}, policy)
        return found

    def _batch(self, live: Mapping[int, str], policy: Policy) -> _Batch:
        plan = self._traffic.plan(self._planner, live, policy)
        loads = (
            self._traffic.of(site, plan, live, Route(plan.routes[site.index]))
            for site in self._planner.sites
        )
        return _Batch(plan, tuple(loads))

    def _work_out(self, live: Mapping[int, str]) -> ShapeCost:
        policy = self._policies[0]
        batch, base = self._batch(live, policy), self._base(policy)
        losses = self._losses(live, batch, base)
        costs = [self._cost(self._batch(live, other), other) for other in self._policies[1:]]
        advice = (*self._by_target(losses, batch), *self._by_policy(live, policy, batch))
        return ShapeCost(
            (self._cost(batch, policy), *costs),
            tuple(sorted(advice, key=lambda given: -given.saved_share)),
            losses,
        )

    def _cost(self, batch: _Batch, policy: Policy) -> AdapterCost:
        base = self._base(policy)
        changed = [
            route
            for route, before in zip(batch.plan.routes, base.plan.routes, strict=True)
            if before == Route.FUSED
        ]
        extra = (batch.moved - base.moved) / self._tokens
        return AdapterCost(
            policy=label_of(policy),
            sites_unfused=changed.count(Route.UNFUSED),
            sites_dual=changed.count(Route.DUAL),
            sites_absorbed=changed.count(Route.ABSORBED),
            bytes_per_token=batch.moved / self._tokens,
            extra_bytes_per_token=extra,
            extra_share=extra * self._tokens / base.moved if base.moved else 0.0,
            extra_seconds_per_token=(batch.seconds - base.seconds) / self._tokens,
        )

    # --- advice ---------------------------------------------------------------------------------

    def _losses(
        self, live: Mapping[int, str], batch: _Batch, base: _Batch
    ) -> dict[tuple[str, ...], TargetLoss]:
        sites: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for site, now, before in zip(self._planner.sites, batch.loads, base.loads, strict=True):
            extra = now.moved - before.moved
            if extra > 0 and base.plan.routes[site.index] == Route.FUSED:
                sites[self._targets(site, live)].append(extra / self._tokens)
        return {targets: TargetLoss(len(extra), sum(extra)) for targets, extra in sites.items()}

    def _targets(self, site: Site, live: Mapping[int, str]) -> tuple[str, ...]:
        """Ends of the names of the modules whose branches read a site's output."""
        readers = self._planner.registry.raw_readers(site.layers[0], live.keys())
        ends = {r.layer.rpartition(".")[2] for r in readers if r.kind == "branch"}
        return tuple(sorted(ends))

    def _by_target(
        self, losses: Mapping[tuple[str, ...], TargetLoss], batch: _Batch
    ) -> Iterable[Advice]:
        total = batch.moved / self._tokens
        for targets, loss in losses.items():
            share = loss.moved / total
            if not targets or share < _WORTH_SAYING:
                continue
            stays = "1 site stays" if loss.sites == 1 else f"{loss.sites} sites stay"
            yield Advice(
                text=f"without {_listed(targets)} in its targets {stays} fused: "
                f"{100 * share:.1f} % less activation traffic",
                sites=loss.sites,
                saved_share=share,
            )

    def _by_policy(
        self, live: Mapping[int, str], policy: Policy, batch: _Batch
    ) -> Iterable[Advice]:
        extra = batch.moved - self._base(policy).moved
        if extra <= 0:
            return
        for name in _ALTERNATIVES:
            if name == policy.name:
                continue
            other = make_policy(name)
            theirs = self._batch(live, other)
            saved = batch.moved - theirs.moved
            if saved / batch.moved < _WORTH_SAYING:
                continue
            kept = sum(
                now != Route.UNFUSED and before == Route.UNFUSED
                for now, before in zip(theirs.plan.routes, batch.plan.routes, strict=True)
            )
            again = f"{kept} sites write codes again, " if kept else ""
            yield Advice(
                # Rounded down: what is left is not nothing.
                text=f"policy {name} recovers {math.floor(100 * saved / extra)} % of what it "
                f"costs: {again}{100 * saved / batch.moved:.1f} % less activation traffic",
                sites=kept,
                saved_share=saved / batch.moved,
            )


def _listed(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def fleet_report(
    shapes: Iterable[tuple[str, ShapeCost]],
    base_moved: float,
    weights: Mapping[str, float] | None,
) -> FleetReport:
    """What target modules cost over all adapters.

    Args:
        shapes: each adapter's name, and what it costs.
        base_moved: bytes a token without adapters.
        weights: how often each is used, by name; those that are absent never are.  None for all
            alike.
    """
    entries = list(shapes)
    given = {name: 1.0 if weights is None else weights.get(name, 0.0) for name, _ in entries}
    total = sum(given.values())
    adapters: dict[tuple[str, ...], int] = defaultdict(int)
    weight: dict[tuple[str, ...], float] = defaultdict(float)
    moved: dict[tuple[str, ...], float] = defaultdict(float)
    sites: dict[tuple[str, ...], int] = defaultdict(int)
    for name, shape in entries:
        share = given[name] / total if total else 0.0
        for targets, loss in shape.losses.items():
            adapters[targets] += 1
            weight[targets] += share
            moved[targets] += share * loss.moved
            sites[targets] = max(sites[targets], loss.sites)
    kind: Literal["evenly", "traffic"] = "evenly" if weights is None else "traffic"
    return FleetReport(
        adapters=len(entries),
        shapes=len({id(shape) for _, shape in entries}),
        weights=kind,
        targets=tuple(
            TargetCost(
                targets=targets,
                adapters=adapters[targets],
                weight=weight[targets],
                sites=sites[targets],
                extra_bytes_per_token=moved[targets],
                extra_share=moved[targets] / base_moved if base_moved else 0.0,
            )
            for targets in sorted(moved, key=lambda t: (-moved[t], t))
        ),
    )
