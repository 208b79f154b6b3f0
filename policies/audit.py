"""The audit: for every site who consumes it, its route for each adapter set, why, and what ran."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..adapters.manager import AdapterManager
from ..adapters.version import AdapterInfo
from ..core.route import Route
from ..fusion.discover import Unsited
from ..fusion.site import Site
from ..linear.registry import LayerRegistry, Unwrapped
from .plan import Plan, SitePlan
from .planner import Planner
from .policy import make_policy

SCHEMA_VERSION = 1
_BASE = "(no adapter)"
# How the policies' reasons begin where they name every reader, which a table has no room for.
_BY_ADAPTERS = ("read raw by", "raw rows for", "absorbs")
_COLOURS = {"fused": "green", "unfused": "yellow", "dual": "cyan", "absorbed": "blue"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Rejected(_Part):
    """A producer that was passed over."""

    producer: str
    reason: str


class RouteReport(_Part):
    """One site's route for one adapter set."""

    adapters: tuple[str, ...]
    route: str
    reason: str
    producer: str
    emulated: bool
    rejected: tuple[Rejected, ...]
    raw_readers: tuple[str, ...]
    blame: tuple[str, ...]


class SiteReport(_Part):
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


class AdapterReport(_Part):
    """One adapter and what it costs under the policy."""

    name: str
    digest: str
    source: str
    rank: int
    layers: int
    nbytes: int
    notes: tuple[str, ...]
    sites_unfused: int


class Excluded(_Part):
    """A linear that no site feeds, or that was not wrapped, and why."""

    name: str
    reason: str


class KernelReport(_Part):
    """A base matmul kernel, and how many linears it serves."""

    name: str
    key: str | None
    emulated: bool
    linears: int


class AuditReport(_Part):
    """What `ServedModel.audit()` returns; `str()` is the table, `model_dump_json()` the JSON."""

    schema_version: int
    epoch: int
    policy: str
    platform: str
    native_reason: str
    kernels: tuple[KernelReport, ...]
    adapter_sets: tuple[tuple[str, ...], ...]
    sites: tuple[SiteReport, ...]
    adapters: tuple[AdapterReport, ...]
    unsited: tuple[Excluded, ...]
    unwrapped: tuple[Excluded, ...]

    def render(self, console: Console) -> None:
        """Print the report for a person."""
        console.print(_headline(self))
        for table in _tables(self):
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
) -> AuditReport:
    """Plan for some adapter sets and put the counters of what ran beside.

    Args:
        planner: makes the plans, the same objects that batches use.
        adapters: the loaded ones.
        unsited: linears that no site feeds.
        adapter_sets: names; None for: no adapter, each alone, all together.
        policy: another policy than the one in force.

    Raises:
        ConfigError: the policy is unknown.
        AdapterNotFoundError: a set names an adapter that is not loaded.
    """
    chosen = make_policy(policy) if policy else planner.policy
    infos = adapters.list()
    sets = _adapter_sets(infos) if adapter_sets is None else [tuple(s) for s in adapter_sets]
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
        adapter_sets=tuple(tuple(sorted(names)) for names in sets),
        sites=tuple(_site(site, plans) for site in planner.sites),
        adapters=tuple(_adapter(info, alone[info.name], base) for info in infos),
        unsited=tuple(Excluded(name=u.layer, reason=u.reason) for u in unsited),
        unwrapped=_unwrapped(planner.registry.unwrapped),
    )


def _kernels(registry: LayerRegistry) -> tuple[KernelReport, ...]:
    counts = Counter(
        (layer.kernel.name, layer.kernel.contract.key, layer.kernel.emulated) for layer in registry
    )
    return tuple(
        KernelReport(
            name=name, key=None if key is None else str(key), emulated=emulated, linears=count
        )
        for (name, key, emulated), count in counts.items()
    )


def _adapter_sets(infos: tuple[AdapterInfo, ...]) -> list[tuple[str, ...]]:
    names = [info.name for info in infos]
    sets = [(), *((name,) for name in names)]
    if len(names) > 1:
        sets.append(tuple(names))
    return sets


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
        layers=info.layers,
        nbytes=info.nbytes,
        notes=info.notes,
        sites_unfused=lost,
    )


def _unwrapped(entries: Iterable[Unwrapped]) -> tuple[Excluded, ...]:
    return tuple(Excluded(name=entry.name, reason=entry.reason) for entry in entries)


# --- for people --------------------------------------------------------------------------------


def _headline(report: AuditReport) -> Text:
    text = Text(f"policy {report.policy}, {report.platform}, epoch {report.epoch}")
    for kernel in report.kernels:
        takes = f"takes {kernel.key}" if kernel.key else "takes raw activations"
        note = "; emulated: float32 weights in memory" if kernel.emulated else ""
        linears = "linear" if kernel.linears == 1 else "linears"
        text.append(f"\n{kernel.linears} {linears} by kernel {kernel.name} ({takes}{note})")
    if report.native_reason:
        text.append(f"\nC kernels: {report.native_reason}", style="yellow")
    return text


def _tables(report: AuditReport) -> Iterator[Table]:
    yield _site_table(report)
    if report.adapters:
        yield _adapter_table(report)
    passed_over = {
        (r.producer, r.reason): Excluded(name=r.producer, reason=r.reason)
        for site in report.sites
        for route in site.routes
        for r in route.rejected
    }
    for title, entries in (
        ("producers passed over", tuple(passed_over.values())),
        ("linears fed raw: no site makes their input", report.unsited),
        ("linears left as they were, or tied", report.unwrapped),
    ):
        if entries:
            yield _excluded_table(title, entries)


def _site_table(report: AuditReport) -> Table:
    table = Table(
        Column("site", overflow="fold"),
        "computes",
        "feeds",
        "adapters",
        "route",
        "why",
        "ran",
        show_lines=False,
    )
    for name, group in _alike(report.sites):
        first = group[0]
        ran: dict[str, int] = {}
        for site in group:
            for route, count in site.ran.items():
                ran[route] = ran.get(route, 0) + count
        for i, route in enumerate(first.routes):
            table.add_row(
                (f"{name} (x{len(group)})" if len(group) > 1 else name) if i == 0 else "",
                Text((first.semantics or "?") if i == 0 else ""),
                ", ".join(c.rpartition(".")[2] for c in first.consumers) if i == 0 else "",
                ", ".join(route.adapters) or _BASE,
                Text(_route_label(route), style=_COLOURS[route.route]),
                Text(_why(route)),
                ", ".join(f"{k} {v}" for k, v in sorted(ran.items())) if i == 0 else "",
                end_section=i == len(first.routes) - 1,
            )
    return table


def _route_label(route: RouteReport) -> str:
    producer = f" by {route.producer}" if route.producer else ""
    return f"{route.route}{producer}{' (emulated)' if route.emulated else ''}"


def _why(route: RouteReport) -> str:
    # Only where adapters are the reason; a site without a producer is nobody's fault.
    head, *rest = route.reason.split("; ")
    if route.blame and head.startswith(_BY_ADAPTERS):
        head = f"adapter {', '.join(route.blame)}"
    return "; ".join([head, *rest])


def _without_index(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _alike(sites: tuple[SiteReport, ...]) -> Iterator[tuple[str, list[SiteReport]]]:
    """Sites that differ in nothing but the number of their layer, together."""
    groups: dict[Any, list[SiteReport]] = {}
    for site in sites:
        key = (
            _without_index(site.site),
            site.semantics,
            tuple((r.route, r.producer, _without_index(_why(r))) for r in site.routes),
        )
        groups.setdefault(key, []).append(site)
    for key, group in groups.items():
        yield (key[0] if len(group) > 1 else group[0].site), group


def _adapter_table(report: AuditReport) -> Table:
    table = Table("adapter", "rank", "linears", "bytes", "sites it unfuses", "digest", "notes")
    for adapter in report.adapters:
        table.add_row(
            adapter.name,
            str(adapter.rank),
            str(adapter.layers),
            f"{adapter.nbytes:,}",
            f"{adapter.sites_unfused} of {len(report.sites)}",
            adapter.digest[:12],
            "; ".join(adapter.notes),
        )
    return table


def _excluded_table(title: str, entries: tuple[Excluded, ...]) -> Table:
    table = Table("name", "why", title=title, title_justify="left")
    groups: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = (_without_index(entry.name), _without_index(entry.reason))
        groups[key] = groups.get(key, 0) + 1
    for (name, reason), count in groups.items():
        table.add_row(f"{name} (x{count})" if count > 1 else name, Text(reason))
    return table
