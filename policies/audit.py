"""The audit: for every site who consumes it, its route for each adapter set, why, and what ran."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from ..adapters.branch import LayerBranch
from ..adapters.experts import ExpertsBranch
from ..adapters.low_rank import LowRankSlots
from ..adapters.manager import AdapterManager
from ..adapters.version import AdapterInfo
from ..core.errors import ConfigError
from ..core.report import ReportPart
from ..core.route import Route
from ..fusion.discover import Unsited
from ..fusion.site import Site
from ..linear.checkpoint import ResolvedQuant
from ..linear.experts.layer import ExpertsLinear
from ..linear.kernels.base import BaseKernel
from ..linear.registry import LayerRegistry, Unwrapped
from .audit_tables import headline, tables
from .plan import Plan, SitePlan
from .planner import Planner
from .policy import make_policy

SCHEMA_VERSION = 4

# With more adapters than this, only those in slots are planned for one by one.
_MOST_PLANNED = 32


class Rejected(ReportPart):
    """A producer that was passed over."""

    producer: str
    reason: str


class RouteReport(ReportPart):
    """One site's route for one adapter set."""

    adapters: tuple[str, ...]
    route: str
    reason: str
    producer: str
    emulated: bool
    rejected: tuple[Rejected, ...]
    raw_readers: tuple[str, ...]
    blame: tuple[str, ...]


class SiteReport(ReportPart):
    """One site: what it is, what is planned, and what ran."""

    site: str
    kind: str
    semantics: str | None
    key: str | None
    consumers: tuple[str, ...]
    other_readers: tuple[str, ...]
    kernels: tuple[str, ...]
    emulated_kernel: bool
    routes: tuple[RouteReport, ...]
    ran: dict[str, int]
    fallbacks: dict[str, int]


class AdapterReport(ReportPart):
    """One adapter and what it costs under the policy."""

    name: str
    digest: str
    source: str
    rank: int
    modules: int
    nbytes: int
    notes: tuple[str, ...]
    sites_unfused: int
    peft_type: str
    state: str
    tier: str


class Excluded(ReportPart):
    """A linear, or experts, that no site feeds or that were not wrapped, and why."""

    name: str
    reason: str


class PassedOver(ReportPart):
    """A base matmul kernel that was preferred, and why it was not chosen."""

    kernel: str
    reason: str


class KernelReport(ReportPart):
    """A base matmul kernel, how many linears it serves, and why no other does.

    `experts` is how many experts each of its `linears` has, which are then projections of experts;
    0 for linears of their own.  `weight_bytes` counts the weights of those linears in memory,
    scales included; `scales` says where calibrated input scales come from.
    """

    name: str
    key: str | None
    emulated: bool
    linears: int
    experts: int
    weight_bytes: int
    scales: tuple[str, ...]
    rejected: tuple[PassedOver, ...]


class BranchReport(ReportPart):
    """A kernel of adapters' low-rank products, how many linears it serves, and why no other does.

    `fallbacks` counts the calls that the eager definition computed in its place, by reason.
    """

    name: str
    linears: int
    rejected: tuple[PassedOver, ...]
    fallbacks: dict[str, int]


class CheckpointReport(ReportPart):
    """How a quantised checkpoint was read: what was chosen from where, and what matched nothing."""

    decisions: tuple[str, ...]
    unmatched: tuple[str, ...]


class AuditReport(ReportPart):
    """What `ServedModel.audit()` returns; `str()` is the table, `model_dump_json()` the JSON.

    `loaded` counts all adapters that were read; where they are many, `adapters` lists those in
    slots.
    """

    schema_version: int
    epoch: int
    policy: str
    platform: str
    native_reason: str
    kernels: tuple[KernelReport, ...]
    branches: tuple[BranchReport, ...]
    checkpoint: CheckpointReport | None
    adapter_sets: tuple[tuple[str, ...], ...]
    sites: tuple[SiteReport, ...]
    adapters: tuple[AdapterReport, ...]
    loaded: int
    unsited: tuple[Excluded, ...]
    unwrapped: tuple[Excluded, ...]

    def render(self, console: Console) -> None:
        """Print the report for a person."""
        console.print(headline(self))
        for table in tables(self):
            console.print(table)

    def __str__(self) -> str:
        buffer = io.StringIO()
        self.render(Console(file=buffer, width=140, no_color=True))
        return buffer.getvalue()


def audit(
    planner: Planner,
    adapters: AdapterManager,
    unsited: Iterable[Unsited],
    *,
    adapter_sets: Iterable[Iterable[str]] | None = None,
    policy: str | None = None,
    checkpoint: ResolvedQuant | None = None,
) -> AuditReport:
    """Plan for some adapter sets and put the counters of what ran beside.

    Args:
        planner: makes the plans, the same objects that batches use.
        adapters: the loaded ones.
        unsited: linears that no site feeds.
        adapter_sets: names; None for: no adapter, each alone, all together (of more than 32, those
            in slots).
        policy: another policy than the one in force.
        checkpoint: how the model's quantised checkpoint was read, if it comes from one.

    Raises:
        ConfigError: the policy is unknown, or a set is one text.
        AdapterNotFoundError: a set names an adapter that is not loaded.
    """
    chosen = make_policy(policy) if policy else planner.policy
    # Of one that was only registered, nothing is known yet.
    known = tuple(info for info in adapters.list() if info.digest)
    few = len(known) <= _MOST_PLANNED
    infos = tuple(info for info in known if few or info.slot is not None)
    sets = _adapter_sets(infos) if adapter_sets is None else [_names(s) for s in adapter_sets]
    plans = [planner.plan(adapters.live(names), chosen) for names in sets]
    alone = {info.name: planner.plan(adapters.live([info.name]), chosen) for info in infos}
    base = planner.plan({}, chosen)
    return AuditReport(
        schema_version=SCHEMA_VERSION,
        epoch=planner.registry.epoch,
        policy=chosen.name,
        platform=str(planner.platform),
        native_reason=planner.platform.native_reason,
        kernels=_kernels(planner.registry),
        branches=_branches(planner.registry),
        checkpoint=checkpoint
        and CheckpointReport(decisions=checkpoint.decisions, unmatched=checkpoint.unmatched),
        adapter_sets=tuple(tuple(sorted(names)) for names in sets),
        sites=tuple(_site(site, plans) for site in planner.sites),
        adapters=tuple(_adapter(info, alone[info.name], base) for info in infos),
        loaded=len(known),
        unsited=tuple(Excluded(name=u.layer, reason=u.reason) for u in unsited),
        unwrapped=_unwrapped(planner.registry.unwrapped),
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


def _adapter_sets(infos: tuple[AdapterInfo, ...]) -> list[tuple[str, ...]]:
    names = [info.name for info in infos]
    sets = [(), *((name,) for name in names)]
    if len(names) > 1:
        sets.append(tuple(names))
    return sets


def _names(adapters: Iterable[str]) -> tuple[str, ...]:
    if isinstance(adapters, str):
        raise ConfigError(
            f"adapter set {adapters!r}",
            "is one text",
            "pass sets of names, such as [['sql']]",
        )
    return tuple(adapters)


def _site(site: Site, plans: list[Plan]) -> SiteReport:
    facts, counters, key = site.facts, site.counters, site.common_key()
    kernels = tuple(dict.fromkeys(layer.kernel.name for layer in site.layers))
    return SiteReport(
        site=facts.name,
        kind=facts.kind,
        semantics=None if facts.semantics is None else str(facts.semantics),
        key=None if key is None else str(key),
        consumers=facts.consumers,
        other_readers=facts.other_readers,
        kernels=kernels,
        emulated_kernel=any(layer.kernel.emulated for layer in site.layers),
        routes=tuple(_route(plan.sites[site.index], plan.adapters) for plan in plans),
        ran={str(route): count for route, count in counters.routes().items()},
        fallbacks=counters.fallbacks(),
    )


def _route(plan: SitePlan, adapters: tuple[str, ...]) -> RouteReport:
    return RouteReport(
        adapters=adapters,
        route=str(plan.route),
        reason=plan.reason,
        producer=plan.producer,
        emulated=plan.emulated,
        rejected=tuple(Rejected(producer=r.name, reason=r.reason) for r in plan.rejected),
        raw_readers=plan.raw_readers,
        blame=plan.blame,
    )


def _adapter(info: AdapterInfo, plan: Plan, base: Plan) -> AdapterReport:
    lost = sum(
        before != Route.UNFUSED and after == Route.UNFUSED
        for before, after in zip(base.routes, plan.routes, strict=True)
    )
    return AdapterReport(
        name=info.name,
        digest=info.digest,
        source=info.source,
        rank=info.rank,
        modules=info.modules,
        nbytes=info.nbytes,
        notes=info.notes,
        sites_unfused=lost,
        peft_type=info.peft_type,
        state=info.state,
        tier=info.tier,
    )


def _unwrapped(entries: Iterable[Unwrapped]) -> tuple[Excluded, ...]:
    return tuple(Excluded(name=entry.name, reason=entry.reason) for entry in entries)
