"""The audit for a person: a headline, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from ...core.selection import Rejection
from .groups import adapter_groups, site_groups, without_index

if TYPE_CHECKING:
    from .report import AuditReport, Excluded, FleetReport, KernelReport, RouteReport

_BASE = "(no adapter)"
# How the policies' reasons begin where they name every reader, which a table has no room for.
_BY_ADAPTERS = ("read raw by", "raw rows for", "absorbs", "changed before the linears by")
ROUTE_COLOURS = {"fused": "green", "unfused": "yellow", "dual": "cyan", "absorbed": "blue"}


def headline(report: AuditReport) -> Text:
    """Policy, platform, and the base kernels."""
    text = Text(
        f"{_many('policy', 'policies', report.policies)}, {report.platform}, epoch {report.epoch}"
    )
    for problem in report.problems:
        text.append(f"\n{problem.part}: {problem.reason}; {problem.remedy}", style="red")
    for assumption in report.assumptions:
        text.append(f"\nassumed: {assumption}", style="yellow")
    for kernel in report.kernels:
        takes = f"takes {kernel.key}" if kernel.key else "takes raw activations"
        note = "; emulated: float32 weights in memory" if kernel.emulated else ""
        if kernel.scales:
            note += f"; input scales: {', '.join(kernel.scales)}"
        size = f"{kernel.weight_bytes / 1e6:,.1f} MB"
        text.append(f"\n{_served(kernel)} by kernel {kernel.name}, {size} ({takes}{note})")
    for branch in report.branches:
        text.append(f"\nlow-rank products of {branch.linears} linears by kernel {branch.name}")
        for reason, calls in branch.fallbacks.items():
            text.append(f"\n{calls} of them by the eager definition: {reason}", style="yellow")
    if report.loaded > len(report.adapters):
        text.append(f"\n{report.loaded} adapters; those in slots are listed")
    for entry in report.checkpoint.unmatched if report.checkpoint else ():
        text.append(f"\nignore entry {entry!r} of the checkpoint matches nothing", style="yellow")
    if report.native_reason:
        text.append(f"\nC kernels: {report.native_reason}", style="yellow")
    return text


def _many(one: str, several: str, names: tuple[str, ...]) -> str:
    return f"{one if len(names) == 1 else several} {', '.join(names)}"


def _served(kernel: KernelReport) -> str:
    ending = "" if kernel.linears == 1 else "s"
    if kernel.experts:
        return f"{kernel.linears} projection{ending} of {kernel.experts} experts each"
    return f"{kernel.linears} linear{ending}"


def tables(report: AuditReport) -> Iterator[Table]:
    """Sites, adapters, and what was passed over or left out."""
    mismatches = [(s.site, text) for s in report.sites for text in s.mismatches]
    if mismatches:
        yield _pairs_table("what ran is not what was planned", mismatches)
    yield _site_table(report)
    if report.adapters:
        yield _adapter_table(report)
        yield _cost_table(report)
    if report.fleet is not None:
        yield _fleet_table(report.fleet)
    passed_over = {
        (r.producer, r.reason): Rejection(r.producer, r.reason)
        for site in report.sites
        for route in site.routes
        for r in route.rejected
    }
    kernels_passed_over = {
        (r.kernel, r.reason): Rejection(r.kernel, r.reason)
        for kernel in report.kernels
        for r in kernel.rejected
    }
    branches_passed_over = {
        (r.kernel, r.reason): Rejection(r.kernel, r.reason)
        for branch in report.branches
        for r in branch.rejected
    }
    for title, entries in (
        ("base kernels passed over", tuple(kernels_passed_over.values())),
        ("kernels of low-rank products passed over", tuple(branches_passed_over.values())),
        ("producers passed over", tuple(passed_over.values())),
        ("linears fed raw: no site makes their input", report.unsited),
        ("left as they were, or tied", report.unwrapped),
    ):
        if entries:
            yield _excluded_table(title, entries)


def _site_table(report: AuditReport) -> Table:
    several = len(report.policies) > 1
    table = Table(
        Column("site", overflow="fold"),
        "computes",
        "feeds",
        *(["policy"] if several else []),
        "adapters",
        "route",
        Column("bytes/token", justify="right"),
        "why",
        "ran",
        show_lines=False,
    )
    for group in site_groups(report.sites):
        first, name, count, ran = group.first, group.name, len(group.sites), group.ran()
        for i, route in enumerate(first.routes):
            table.add_row(
                (f"{name} (x{count})" if count > 1 else name) if i == 0 else "",
                Text((first.semantics or "?") if i == 0 else ""),
                ", ".join(c.rpartition(".")[2] for c in first.consumers) if i == 0 else "",
                *([route.policy] if several else []),
                ", ".join(route.adapters) or _BASE,
                Text(_route_label(route), style=ROUTE_COLOURS[route.route]),
                f"{route.bytes_per_token:,.0f}",
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


def _adapter_table(report: AuditReport) -> Table:
    columns = ("adapter", "type", "rank", "modules", "bytes", "lies in", "sites it unfuses")
    table = Table(*columns, "digest", "notes")
    for adapter in report.adapters:
        table.add_row(
            adapter.name,
            adapter.peft_type,
            str(adapter.rank),
            str(adapter.modules),
            f"{adapter.nbytes:,}",
            adapter.tier,
            f"{adapter.sites_unfused} of {len(report.sites)}",
            adapter.digest[:12],
            "; ".join(adapter.notes),
        )
    return table


def _cost_table(report: AuditReport) -> Table:
    """What adapters cost; those that cost the same, together."""
    table = Table(
        "adapters",
        *(["policy"] if len(report.policies) > 1 else []),
        "unfused / dual / absorbed",
        Column("more bytes/token", justify="right"),
        Column("of the base", justify="right"),
        Column("more µs/token", justify="right"),
        "what would cost less",
        title=f"what adapters cost in batches of {report.tokens} tokens, {_source(report)}",
        title_justify="left",
    )
    for group in adapter_groups(report):
        adapter = group.first
        for i, cost in enumerate(adapter.costs):
            table.add_row(
                group.label() if i == 0 else "",
                *([cost.policy] if len(report.policies) > 1 else []),
                f"{cost.sites_unfused} / {cost.sites_dual} / {cost.sites_absorbed}",
                f"{cost.extra_bytes_per_token:,.0f}",
                f"{100 * cost.extra_share:.1f} %",
                f"{cost.extra_seconds_per_token * 1e6:.3g}",
                Text("\n".join(given.text for given in adapter.advice) if i == 0 else ""),
                end_section=i == len(adapter.costs) - 1,
            )
    return table


def _source(report: AuditReport) -> str:
    measured = "measured" if report.device.measured else "estimated from the datasheet"
    return f"times for {report.device.kind} {measured}"


def _fleet_table(fleet: FleetReport) -> Table:
    table = Table(
        "targets",
        Column("adapters", justify="right"),
        Column("of the traffic", justify="right"),
        Column("sites", justify="right"),
        Column("more bytes/token", justify="right"),
        Column("of the base", justify="right"),
        title=f"what target modules cost over {fleet.adapters} adapters of {fleet.shapes} shapes, "
        f"weighted {'by traffic' if fleet.weights == 'traffic' else 'evenly'}",
        title_justify="left",
    )
    for cost in fleet.targets:
        table.add_row(
            ", ".join(cost.targets) or "(none)",
            str(cost.adapters),
            f"{100 * cost.weight:.1f} %",
            str(cost.sites),
            f"{cost.extra_bytes_per_token:,.0f}",
            f"{100 * cost.extra_share:.1f} %",
        )
    return table


def _pairs_table(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table("name", "what", title=title, title_justify="left")
    for name, what in pairs:
        table.add_row(name, Text(what, style="red"))
    return table


def _excluded_table(title: str, entries: Iterable[Excluded | Rejection]) -> Table:
    table = Table("name", "why", title=title, title_justify="left")
    groups: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = (without_index(entry.name), without_index(entry.reason))
        groups[key] = groups.get(key, 0) + 1
    for (name, reason), count in groups.items():
        table.add_row(f"{name} (x{count})" if count > 1 else name, Text(reason))
    return table
