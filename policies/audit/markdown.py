"""The audit as Markdown, for pull requests and wikis."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from .groups import adapter_groups, adapter_set, site_groups
from .report import AuditReport
from .rules import Fired

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+\-!|~])")


def markdown(report: AuditReport, fired: Iterable[Fired] = ()) -> str:
    """The report as GitHub's Markdown.

    Args:
        report: an audit.
        fired: rules that are true of it.
    """
    return "\n".join(_lines(report, tuple(fired))) + "\n"


def text(value: object) -> str:
    """A value that is no markup, whatever its characters."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(str(value).split()), quote=False))


def _lines(report: AuditReport, fired: tuple[Fired, ...]) -> Iterator[str]:
    yield f"## Audit of {text(report.model)}"
    yield ""
    measured = "measured" if report.device.measured else "from the datasheet"
    yield (
        f"Policy {text(', '.join(report.policies))}; {text(report.platform)}; times for "
        f"{text(report.device.kind)}, {measured}; batches of {report.tokens} tokens."
    )
    for title, lines in (
        ("Rules that fired", [f"{text(f.rule)}: {text(f.found)}" for f in fired]),
        ("Could not be audited", [f"{text(p.part)}: {text(p.reason)}" for p in report.problems]),
        (
            "What ran is not what was planned",
            [f"{text(s.site)}: {text(m)}" for s in report.sites for m in s.mismatches],
        ),
        ("Assumed", list(map(text, report.assumptions))),
    ):
        if lines:
            yield from ("", f"**{title}**", "", *(f"- {line}" for line in lines))
    yield from ("", "### Sites", "")
    yield from _table(
        ("site", "computes", "policy", "adapters", "route", "bytes/token", "why"), _sites(report)
    )
    if report.adapters:
        yield from ("", "### What adapters cost", "")
        columns = ("adapters", "policy", "unfused / dual / absorbed", "more bytes/token", "", "")
        yield from _table((*columns[:-2], "of the base", "what would cost less"), _costs(report))
    if report.fleet is not None:
        yield from ("", "### What target modules cost over all adapters", "")
        columns = ("targets", "adapters", "of the traffic", "more bytes/token", "of the base")
        yield from _table(
            columns,
            (
                (
                    ", ".join(cost.targets) or "(none)",
                    cost.adapters,
                    f"{100 * cost.weight:.1f} %",
                    f"{cost.extra_bytes_per_token:,.0f}",
                    f"{100 * cost.extra_share:.1f} %",
                )
                for cost in report.fleet.targets
            ),
        )


def _sites(report: AuditReport) -> Iterator[tuple[object, ...]]:
    for group in site_groups(report.sites):
        count = f" (x{len(group.sites)})" if len(group.sites) > 1 else ""
        for index, route in enumerate(group.first.routes):
            by = f" by {route.producer}" if route.producer else ""
            yield (
                f"{group.name}{count}" if index == 0 else "",
                (group.first.semantics or "?") if index == 0 else "",
                route.policy,
                adapter_set(route.adapters),
                f"{route.route}{by}",
                f"{route.bytes_per_token:,.0f}",
                group.reason(route),
            )


def _costs(report: AuditReport) -> Iterator[tuple[object, ...]]:
    for group in adapter_groups(report):
        for index, cost in enumerate(group.first.costs):
            advice = "; ".join(given.text for given in group.first.advice) if index == 0 else ""
            yield (
                group.label() if index == 0 else "",
                cost.policy,
                f"{cost.sites_unfused} / {cost.sites_dual} / {cost.sites_absorbed}",
                f"{cost.extra_bytes_per_token:,.0f}",
                f"{100 * cost.extra_share:.1f} %",
                advice,
            )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(text, row))} |"
