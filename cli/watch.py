"""`branchline audit --watch`: a server's routes, live in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ..policies.audit.groups import site_groups
from ..policies.audit.report import AuditReport
from ..policies.audit.tables import ROUTE_COLOURS


def watch(ask: Callable[[], AuditReport], console: Console, interval: float) -> None:
    """Show what a server does until Ctrl-C.

    Args:
        ask: gives its audit.
        console: to draw on.
        interval: seconds between two looks.

    Raises:
        BranchlineError: what `ask` raises: the server is gone.
    """
    report, seen = ask(), time.monotonic()
    with Live(view(report, None, 0.0), console=console, auto_refresh=False) as live:
        live.refresh()
        try:
            while True:
                time.sleep(interval)
                before, since = report, seen
                report, seen = ask(), time.monotonic()
                live.update(view(report, before, seen - since), refresh=True)
        except KeyboardInterrupt:
            # That is how one leaves it.
            return


def view(report: AuditReport, before: AuditReport | None, seconds: float) -> Group:
    """What is drawn.

    Args:
        report: now.
        before: at the look before; None at the first.
        seconds: between the two.
    """
    head = Text(f"{report.model}: policy {report.policy}, epoch {report.epoch}, {report.loaded} ")
    head.append("adapters")
    rates = {} if before is None else _rates(report, before, seconds)
    table = Table(
        Column("site", overflow="fold"),
        "route without adapters",
        *(Column(f"{route}/s", justify="right") for route in ROUTE_COLOURS),
        Column("calls", justify="right"),
        "plan and fact",
    )
    for group in site_groups(report.sites):
        first = group.first.routes[0] if group.first.routes else None
        calls = [_calls(rates, group.sites, route) for route in ROUTE_COLOURS]
        several = f" (x{len(group.sites)})" if len(group.sites) > 1 else ""
        table.add_row(
            Text(f"{group.name}{several}"),
            Text(first.route, style=ROUTE_COLOURS[first.route]) if first else "?",
            *(f"{rate:,.0f}" if rate else "" for rate in calls),
            f"{sum(group.ran().values()):,}",
            _fact(group.first.mismatches),
        )
    adapters = Table("adapter", "state", "lies in", "sites it unfuses")
    for adapter in report.adapters:
        adapters.add_row(
            Text(adapter.name), adapter.state, adapter.tier, str(adapter.sites_unfused)
        )
    return Group(head, table, *([adapters] if report.adapters else []))


def _rates(
    report: AuditReport, before: AuditReport, seconds: float
) -> Mapping[tuple[str, str], float]:
    was = {site.site: site.ran for site in before.sites}
    return {
        (site.site, route): max(0, count - was.get(site.site, {}).get(route, 0)) / seconds
        for site in report.sites
        for route, count in site.ran.items()
    }


def _calls(rates: Mapping[tuple[str, str], float], sites: tuple, route: str) -> float:
    return sum(rates.get((site.site, route), 0.0) for site in sites)


def _fact(mismatches: tuple[str, ...]) -> Text:
    if not mismatches:
        return Text("as planned", style="green")
    return Text("; ".join(mismatches), style="red")
