"""The audit as one HTML file that needs nothing else: for a browser, a phone, an archive."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from .groups import SiteGroup, adapter_groups, adapter_set, site_groups
from .report import AuditReport, RouteReport
from .rules import Fired

_GIGABYTE = 10**9
_PACKAGE = "branchline.policies.audit"
_LETTERS = {"fused": "F", "dual": "D", "absorbed": "A", "unfused": "U"}
_MEANINGS = (
    ("fused", "one kernel writes codes; the raw activation never reaches memory"),
    ("absorbed", "codes, and the adapters' shrunk rows beside, from one kernel"),
    ("dual", "codes, and the raw rows of the adapters beside"),
    ("unfused", "the raw activation is written, read and quantised apart"),
)


def page(report: AuditReport, fired: Iterable[Fired] = ()) -> str:
    """The report as HTML.

    Args:
        report: an audit.
        fired: rules that are true of it.
    """
    style, script = _file("audit.css"), _file("audit.js")
    groups = tuple(site_groups(report.sites))
    # All adapters together, so that every branch is drawn.
    sizes = list(map(len, report.adapter_sets))
    opened = sizes.index(max(sizes)) if sizes else 0
    return _template().render(
        report=report,
        fired=tuple(fired),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        meanings=_MEANINGS,
        letters=_LETTERS,
        groups=[_station(group, opened) for group in groups],
        opened=opened,
        sets=[adapter_set(names) for names in report.adapter_sets],
        adapters=adapter_groups(report),
        data=[[_route(route, group) for route in group.first.routes] for group in groups],
        summary=tuple(_summary(report)),
        mismatches=[(site.site, text) for site in report.sites for text in site.mismatches],
        dearest=max((a.costs[0].extra_share for a in report.adapters), default=0.0),
    )


@cache
def _template() -> Any:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    environment.filters["whole"] = lambda number: f"{number:,.0f}"
    environment.filters["micro"] = lambda seconds: f"{seconds * 1e6:.3g}"
    environment.filters["set_name"] = adapter_set
    return environment.from_string(_file("audit.html"))


def _file(name: str) -> str:
    return (files(_PACKAGE) / "page_files" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names what may run."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _station(group: SiteGroup, opened: int) -> dict[str, Any]:
    """What the template shows of sites that are alike, first of all with adapter set `opened`."""
    first = group.first
    return {
        "name": group.name,
        "count": len(group.sites),
        "layers": group.layers,
        "semantics": first.semantics or "unknown",
        "kind": first.kind,
        "key": first.key or "raw activations",
        "columns": first.columns,
        "consumers": [consumer.rpartition(".")[2] for consumer in first.consumers],
        "others": first.other_readers,
        "kernels": first.kernels,
        "share": group.share,
        "ran": group.ran(),
        "mismatches": first.mismatches,
        "routes": first.routes,
        "reason": group.reason,
        "shown": first.routes[opened] if first.routes else None,
    }


def _route(route: RouteReport, group: SiteGroup) -> dict[str, Any]:
    """What the script changes where another batch is chosen."""
    return {
        "policy": route.policy,
        "set": adapter_set(route.adapters),
        "route": route.route,
        "letter": _LETTERS[route.route],
        "producer": f"{route.route} by {route.producer}" if route.producer else route.route,
        "reason": group.reason(route),
        "blame": route.blame,
        "bytes": f"{route.bytes_per_token:,.0f}",
    }


def _summary(report: AuditReport) -> Iterator[tuple[str, str]]:
    first = [
        route
        for site in report.sites
        for route in site.routes
        if route.policy == report.policy and not route.adapters
    ]
    if first:
        fused = sum(route.route == "fused" for route in first)
        yield f"{fused} of {len(first)}", "sites are fused where no adapter is used"
    if report.adapters:
        worst = max(report.adapters, key=lambda a: a.costs[0].extra_bytes_per_token)
        cost = worst.costs[0]
        yield (
            f"+{100 * cost.extra_share:.1f} %",
            f"activation traffic in batches of {worst.name}, the dearest of "
            f"{len(report.adapters)} adapters",
        )
    weights = sum(kernel.weight_bytes for kernel in report.kernels)
    size = f"{weights / 1e9:,.2f} GB" if weights >= _GIGABYTE / 100 else f"{weights / 1e6:,.2f} MB"
    yield size, "of weights in memory"
    bad = sum(bool(site.mismatches) for site in report.sites)
    yield str(bad), "sites where something else ran than was planned"
