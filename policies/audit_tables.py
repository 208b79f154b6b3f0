"""The audit for a person: a headline, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from ..core.selection import Rejection

if TYPE_CHECKING:
    from .audit import AuditReport, Excluded, KernelReport, RouteReport, SiteReport

_BASE = "(no adapter)"
# How the policies' reasons begin where they name every reader, which a table has no room for.
_BY_ADAPTERS = ("read raw by", "raw rows for", "absorbs", "changed before the linears by")
_COLOURS = {"fused": "green", "unfused": "yellow", "dual": "cyan", "absorbed": "blue"}


def headline(report: AuditReport) -> Text:
    """Policy, platform, and the base kernels."""
    text = Text(f"policy {report.policy}, {report.platform}, epoch {report.epoch}")
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


def _served(kernel: KernelReport) -> str:
    ending = "" if kernel.linears == 1 else "s"
    if kernel.experts:
        return f"{kernel.linears} projection{ending} of {kernel.experts} experts each"
    return f"{kernel.linears} linear{ending}"


def tables(report: AuditReport) -> Iterator[Table]:
    """Sites, adapters, and what was passed over or left out."""
    yield _site_table(report)
    if report.adapters:
        yield _adapter_table(report)
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


def _excluded_table(title: str, entries: Iterable[Excluded | Rejection]) -> Table:
    table = Table("name", "why", title=title, title_justify="left")
    groups: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = (_without_index(entry.name), _without_index(entry.reason))
        groups[key] = groups.get(key, 0) + 1
    for (name, reason), count in groups.items():
        table.add_row(f"{name} (x{count})" if count > 1 else name, Text(reason))
    return table
