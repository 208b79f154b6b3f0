"""Making the audit: plans for adapter sets under policies, what they cost, and what ran."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ...adapters.branch import LayerBranch
from ...adapters.experts import ExpertsBranch
from ...adapters.low_rank import LowRankSlots
from ...adapters.version import AdapterInfo
from ...core.errors import AdapterNotFoundError, ConfigError
from ...core.route import Route
from ...fusion.discover import Unsited
from ...fusion.site import Site
from ...linear.checkpoint import ResolvedQuant
from ...linear.experts.layer import ExpertsLinear
from ...linear.kernels.base import BaseKernel
from ...linear.registry import LayerRegistry, Unwrapped
from ..base import label_of
from ..cost.model import CostModel
from ..plan import Plan, SitePlan
from ..planner import Planner
from ..policy import Policy
from .costs import CostBook, ShapeCost, fleet_report
from .report import (
    AdapterReport,
    AuditReport,
    BranchReport,
    CheckpointReport,
    DeviceReport,
    Excluded,
    KernelReport,
    PassedOver,
    Problem,
    Rejected,
    RouteReport,
    SiteReport,
)
from .traffic import BatchTraffic, Load

# With more adapters than this, only those in slots are planned for one by one.
_MOST_PLANNED = 32
_ROUTE_NAMES: Mapping[Route, Literal["fused", "unfused", "dual", "absorbed"]] = {
    Route.FUSED: "fused",
    Route.UNFUSED: "unfused",
    Route.DUAL: "dual",
    Route.ABSORBED: "absorbed",
}
#: Of one batch.
MOST_TOKENS = 1 << 20
_PACKAGES = ("branchline", "torch", "triton", "transformers", "peft")


class AuditedAdapters(Protocol):
    """What the audit asks of adapters."""

    def list(self) -> Sequence[AdapterInfo]:
        """All of them."""
        ...

    def live(self, names: Iterable[str]) -> Mapping[int, str]:
        """Identities of the contents behind names."""
        ...


@dataclass(frozen=True)
class Audited:
    """What is audited.

    Attributes:
        planner: makes the plans, the same objects that batches use.
        adapters: the loaded ones.
        unsited: linears that no site feeds.
        model: what the report calls it.
        source: what kind of thing it is.
        checkpoint: how the model's quantised checkpoint was read, if it comes from one.
        assumptions: what had to be taken for granted.
        problems: parts that could not be read.
        fleet: list every adapter, and what target modules cost over all of them.
        weights: of a fleet, how often each adapter is used, by name; None for all alike.
    """

    planner: Planner
    adapters: AuditedAdapters
    unsited: Sequence[Unsited]
    model: str
    source: Literal["model", "folder"] = "model"
    checkpoint: ResolvedQuant | None = None
    assumptions: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    fleet: bool = False
    weights: Mapping[str, float] | None = None


def audit(
    audited: Audited,
    policies: tuple[Policy, ...],
    model: CostModel,
    *,
    adapter_sets: Iterable[Iterable[str]] | None = None,
    tokens: int = 64,
) -> AuditReport:
    """Plan for some adapter sets and put what it costs, and the counters of what ran, beside.

    Args:
        audited: the model and its adapters.
        policies: to plan by; counts of single adapters are under the first.
        model: tells seconds.
        adapter_sets: names; None for: no adapter, each alone, all together (of more than 32, those
            in slots).
        tokens: of the batches that bytes and seconds are counted for.

    Raises:
        ConfigError: a set is one text, or `tokens` no number of tokens.
        AdapterNotFoundError: a set names an adapter that is not loaded.
    """
    if type(tokens) is not int or not 0 < tokens <= MOST_TOKENS:
        raise ConfigError(
            f"tokens={tokens!r}",
            f"is no whole number from 1 to {MOST_TOKENS}",
            "name the size of a batch (command line: --tokens)",
        )
    return _Audit(audited, policies, model, tokens).report(adapter_sets)


@dataclass(frozen=True)
class _PlannedSet:
    """One adapter set under one policy."""

    policy: str
    live: Mapping[int, str]
    plan: Plan


class _Audit:
    def __init__(
        self, audited: Audited, policies: tuple[Policy, ...], model: CostModel, tokens: int
    ) -> None:
        self.audited = audited
        self.planner = audited.planner
        self.policies = policies
        self.model = model
        self.tokens = tokens
        self.traffic = BatchTraffic(self.planner.registry, model, tokens)
        self.book = CostBook(self.planner, policies, self.traffic, tokens)
        # Of one that was only registered, nothing is known yet.
        self.known = tuple(info for info in audited.adapters.list() if info.modules)
        few = len(self.known) <= _MOST_PLANNED
        self.shown = tuple(
            info for info in self.known if (few or info.slot is not None) and self._is_held(info)
        )

    def report(self, adapter_sets: Iterable[Iterable[str]] | None) -> AuditReport:
        audited, planner = self.audited, self.planner
        given = self._sets() if adapter_sets is None else [_names(s) for s in adapter_sets]
        planned = [self._planned(names, p) for p in self.policies for names in given]
        listed = self.known if audited.fleet else self.shown
        costs = [self._costs(info) for info in listed]
        checkpoint = audited.checkpoint
        return AuditReport(
            source=audited.source,
            model=audited.model,
            versions=dict(_versions()),
            epoch=planner.registry.epoch,
            policy=label_of(self.policies[0]),
            policies=tuple(map(label_of, self.policies)),
            platform=str(planner.platform),
            native_reason=planner.platform.native_reason,
            device=_device(self.model),
            tokens=self.tokens,
            assumptions=audited.assumptions,
            problems=audited.problems,
            kernels=_kernels(planner.registry),
            branches=_branches(planner.registry),
            checkpoint=checkpoint
            and CheckpointReport(decisions=checkpoint.decisions, unmatched=checkpoint.unmatched),
            adapter_sets=tuple(tuple(sorted(names)) for names in given),
            sites=tuple(self._sites(planned)),
            adapters=tuple(map(_adapter, listed, costs)),
            fleet=self._fleet(listed, costs) if audited.fleet else None,
            loaded=len(self.known),
            unsited=tuple(Excluded(name=u.layer, reason=u.reason) for u in audited.unsited),
            unwrapped=_unwrapped(planner.registry.unwrapped),
        )

    def _is_held(self, info: AdapterInfo) -> bool:
        """Whether it is still there: others may unload adapters meanwhile."""
        try:
            self._costs(info)
        except (AdapterNotFoundError, KeyError):
            return False
        return True

    def _sets(self) -> list[tuple[str, ...]]:
        names = [info.name for info in self.shown]
        sets = [(), *((name,) for name in names)]
        if len(names) > 1:
            sets.append(tuple(names))
        return sets

    def _planned(self, names: tuple[str, ...], policy: Policy) -> _PlannedSet:
        live = self.audited.adapters.live(names)
        return _PlannedSet(label_of(policy), live, self.traffic.plan(self.planner, live, policy))

    def _costs(self, info: AdapterInfo) -> ShapeCost:
        ((identity, name),) = self.audited.adapters.live([info.name]).items()
        return self.book.of(identity, name)

    def _fleet(self, infos: Sequence[AdapterInfo], costs: Sequence[ShapeCost]) -> Any:
        named = zip((info.name for info in infos), costs, strict=True)
        return fleet_report(named, self.book.base_moved, self.audited.weights)

    def _sites(self, planned: list[_PlannedSet]) -> Iterator[SiteReport]:
        base = self.book.base_loads()
        total = sum(load.moved for load in base)
        # As the model has their linears, which is nearly as it runs them.
        ordered = sorted(
            zip(self.planner.sites, base, strict=True), key=lambda pair: pair[0].layers[0].index
        )
        for site, load in ordered:
            routes = tuple(self._route(site, one) for one in planned)
            yield _site(site, routes, load.moved / total if total else 0.0)

    def _route(self, site: Site, planned: _PlannedSet) -> RouteReport:
        plan = planned.plan.sites[site.index]
        load = self.traffic.of(site, planned.plan, planned.live, plan.route)
        return _route(plan, planned, load, self.tokens)


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # Triton is not there on every system.
            continue


def _device(model: CostModel) -> DeviceReport:
    device = model.device
    return DeviceReport(
        kind=device.kind,
        bandwidth=device.bandwidth,
        measured=device.measured,
        fingerprint=device.fingerprint,
        note=model.note,
    )


def _kernels(registry: LayerRegistry) -> tuple[KernelReport, ...]:
    groups: dict[Any, list[BaseKernel]] = {}
    for layer in registry:
        kernel = layer.kernel
        experts = layer.experts if isinstance(layer, ExpertsLinear) else 0
        facts = (kernel.name, kernel.contract.key, kernel.emulated, experts, kernel.rejected)
        groups.setdefault(facts, []).append(kernel)
    return tuple(
        KernelReport(
            name=name,
            key=None if key is None else str(key),
            emulated=emulated,
            linears=len(kernels),
            experts=experts,
            weight_bytes=sum(kernel.weight_bytes for kernel in kernels),
            scales=tuple(sorted({source for k in kernels for source in _scale_sources(k)})),
            rejected=tuple(PassedOver(kernel=r.name, reason=r.reason) for r in rejected),
        )
        for (name, key, emulated, experts, rejected), kernels in groups.items()
    )


def _branches(registry: LayerRegistry) -> tuple[BranchReport, ...]:
    groups: dict[Any, list[LowRankSlots]] = {}
    for layer in registry:
        branch = layer.branch
        slots = branch.product if isinstance(branch, LayerBranch | ExpertsBranch) else None
        if slots is not None:
            groups.setdefault((slots.kernel.name, slots.rejected), []).append(slots)
    return tuple(
        BranchReport(
            name=name,
            linears=len(group),
            rejected=tuple(PassedOver(kernel=r.name, reason=r.reason) for r in rejected),
            fallbacks=dict(sum((slots.fallbacks for slots in group), Counter())),
        )
        for (name, rejected), group in groups.items()
    )


def _scale_sources(kernel: BaseKernel) -> list[str]:
    scales = (kernel.contract.scale, kernel.contract.global_scale)
    return [scale.source for scale in scales if scale is not None and scale.source]


def _names(adapters: Iterable[str]) -> tuple[str, ...]:
    if isinstance(adapters, str):
        raise ConfigError(
            f"adapter set {adapters!r}",
            "is one text",
            "pass sets of names, such as [['sql']]",
        )
    return tuple(adapters)


def _site(site: Site, routes: tuple[RouteReport, ...], share: float) -> SiteReport:
    facts, counters, key = site.facts, site.counters, site.common_key()
    kernels = tuple(dict.fromkeys(layer.kernel.name for layer in site.layers))
    planned, ran, fallbacks = counters.planned(), counters.routes(), counters.fallbacks()
    return SiteReport(
        site=facts.name,
        kind=facts.kind,
        semantics=None if facts.semantics is None else str(facts.semantics),
        key=None if key is None else str(key),
        columns=facts.columns,
        rows_per_token=facts.rows_per_token,
        share=share,
        consumers=facts.consumers,
        other_readers=facts.other_readers,
        kernels=kernels,
        emulated_kernel=any(layer.kernel.emulated for layer in site.layers),
        routes=routes,
        planned={str(route): count for route, count in planned.items()},
        ran={str(route): count for route, count in ran.items()},
        fallbacks=fallbacks,
        mismatches=tuple(_mismatches(planned, ran, fallbacks)),
    )


def _mismatches(
    planned: Mapping[Route, int], ran: Mapping[Route, int], fallbacks: Mapping[str, int]
) -> Iterator[str]:
    """Where plan and fact differ."""
    for route in Route:
        wanted, got = planned.get(route, 0), ran.get(route, 0)
        if wanted != got:
            yield f"{route} was planned for {wanted} calls, and ran in {got}"
    for reason, calls in fallbacks.items():
        yield f"what was planned did not run in {calls} calls: {reason}"


def _route(plan: SitePlan, planned: _PlannedSet, load: Load, tokens: int) -> RouteReport:
    return RouteReport(
        policy=planned.policy,
        adapters=planned.plan.adapters,
        route=_ROUTE_NAMES[plan.route],
        code=str(plan.code),
        reason=plan.reason,
        producer=plan.producer,
        emulated=plan.emulated,
        rejected=tuple(Rejected(producer=r.name, reason=r.reason) for r in plan.rejected),
        raw_readers=plan.raw_readers,
        blame=plan.blame,
        bytes_per_token=load.moved / tokens,
        seconds_per_token=load.seconds / tokens,
    )


def _adapter(info: AdapterInfo, found: ShapeCost) -> AdapterReport:
    return AdapterReport(
        name=info.name,
        digest=info.digest,
        source=info.source,
        rank=info.rank,
        modules=info.modules,
        nbytes=info.nbytes,
        notes=info.notes,
        sites_unfused=found.costs[0].sites_unfused,
        peft_type=info.peft_type,
        state=info.state,
        tier=info.tier,
        costs=found.costs,
        advice=found.advice,
    )


def _unwrapped(entries: Iterable[Unwrapped]) -> tuple[Excluded, ...]:
    return tuple(Excluded(name=entry.name, reason=entry.reason) for entry in entries)
