"""What changed between two audits: of a model, its adapters, or the library; or of two policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.errors import ConfigError
from ...core.report import ReportPart
from ...core.route import Route
from .groups import adapter_set, without_index
from .report import AdapterReport, AuditReport, RouteReport, SiteReport

SCHEMA_VERSION = 1
#: Less memory traffic has the higher number.
_ORDER = {str(Route.UNFUSED): 0, str(Route.DUAL): 1, str(Route.ABSORBED): 2, str(Route.FUSED): 3}
_FACTS = ("kind", "semantics", "key", "columns", "rows_per_token", "consumers", "kernels")


class Changed(ReportPart):
    """Something that both have, and that differs."""

    what: str
    before: str
    after: str


class RouteChange(ReportPart):
    """A site's route for one adapter set; `worse` if it keeps less of the fast path."""

    site: str
    policy: str
    adapters: tuple[str, ...]
    before: str
    after: str
    reason: str
    bytes_before: float
    bytes_after: float
    worse: bool


class AuditDiff(ReportPart):
    """From `before` to `after`, by the names of what was audited.

    `settings` are models, devices, versions and policies; `added` and `removed` are sites, adapters
    and adapter sets that only one of the two has.
    """

    schema_version: int = SCHEMA_VERSION
    before: str
    after: str
    settings: tuple[Changed, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    sites: tuple[Changed, ...]
    routes: tuple[RouteChange, ...]
    adapters: tuple[Changed, ...]
    kernels: tuple[Changed, ...]

    @property
    def worse(self) -> tuple[RouteChange, ...]:
        """Routes that keep less of the fast path."""
        return tuple(change for change in self.routes if change.worse)

    @property
    def nothing(self) -> bool:
        """Whether the two say the same."""
        parts = (self.added, self.removed, self.sites, self.routes, self.adapters, self.kernels)
        return not any(parts) and not self.settings

    def render(self, console: Console) -> None:
        """Print it for a person."""
        console.print(Text(f"from {self.before} to {self.after}"))
        if self.nothing:
            console.print("nothing changed")
        for title, names in (("gone", self.removed), ("new", self.added)):
            for name in names:
                console.print(Text(f"{title}: {name}"))
        for title, changes in (
            ("settings", self.settings),
            ("sites", self.sites),
            ("kernels", self.kernels),
            ("adapters", self.adapters),
        ):
            if changes:
                console.print(_table(title, changes))
        if self.routes:
            console.print(_routes_table(self.routes))


def diff(before: AuditReport, after: AuditReport) -> AuditDiff:
    """What changed from one audit to another."""
    old, new = _named(before.sites), _named(after.sites)
    both = [(old[name], new[name]) for name in old if name in new]
    adapters = {a.name: a for a in before.adapters}, {a.name: a for a in after.adapters}
    return AuditDiff(
        before=before.model,
        after=after.model,
        settings=tuple(_settings(before, after)),
        added=tuple(_only(after, before)),
        removed=tuple(_only(before, after)),
        sites=tuple(change for a, b in both for change in _site(a, b)),
        routes=tuple(change for a, b in both for change in _routes(a, b)),
        adapters=tuple(
            change
            for name, a in adapters[0].items()
            if name in adapters[1]
            for change in _adapter(a, adapters[1][name])
        ),
        kernels=tuple(_kernels(before, after)),
    )


def compare(report: AuditReport, first: str, second: str) -> AuditDiff:
    """What changes from one policy to another, of one audit of both.

    Raises:
        ConfigError: one of them was not audited.
    """
    return diff(_under(report, first), _under(report, second))


def _under(report: AuditReport, policy: str) -> AuditReport:
    if policy not in report.policies:
        raise ConfigError(
            f"policy {policy!r}",
            f"was not audited, but {', '.join(report.policies)}",
            f"audit it too (command line: --policy {policy})",
        )
    return report.model_copy(
        update={
            "model": f"policy {policy}",
            "policy": policy,
            "policies": (policy,),
            "sites": tuple(
                # Routes are told apart by their adapters, so that both have the same ones.
                site.model_copy(
                    update={
                        "routes": tuple(
                            route.model_copy(update={"policy": ""})
                            for route in site.routes
                            if route.policy == policy
                        )
                    }
                )
                for site in report.sites
            ),
            "adapters": tuple(
                adapter.model_copy(
                    update={
                        "costs": tuple(
                            cost.model_copy(update={"policy": ""})
                            for cost in adapter.costs
                            if cost.policy == policy
                        )
                    }
                )
                for adapter in report.adapters
            ),
        }
    )


# --- parts ---------------------------------------------------------------------------------------


def _named(sites: Iterable[SiteReport]) -> dict[str, SiteReport]:
    return {site.site: site for site in sites}


def _settings(before: AuditReport, after: AuditReport) -> Iterator[Changed]:
    def facts(report: AuditReport) -> dict[str, str]:
        return {
            "model": report.model,
            "source": report.source,
            "policies": ", ".join(report.policies),
            "platform": report.platform,
            "device": report.device.kind,
            "tokens": str(report.tokens),
            **{f"version of {name}": version for name, version in report.versions.items()},
        }

    yield from _differing(facts(before), facts(after))


def _differing(old: Mapping[str, str], new: Mapping[str, str], prefix: str = "") -> Iterator:
    for what in dict.fromkeys((*old, *new)):
        a, b = old.get(what, "none"), new.get(what, "none")
        if a != b:
            yield Changed(what=f"{prefix}{what}", before=a, after=b)


def _only(report: AuditReport, other: AuditReport) -> Iterator[str]:
    for kind, names, others in (
        ("site", _named(report.sites), _named(other.sites)),
        ("adapter", {a.name for a in report.adapters}, {a.name for a in other.adapters}),
        (
            "adapter set",
            set(map(adapter_set, report.adapter_sets)),
            set(map(adapter_set, other.adapter_sets)),
        ),
    ):
        yield from (f"{kind} {name}" for name in sorted(names) if name not in others)


def _sets(report: AuditReport) -> set[str]:
    return set(map(adapter_set, report.adapter_sets))


def _site(before: SiteReport, after: SiteReport) -> Iterator[Changed]:
    def facts(site: SiteReport) -> dict[str, str]:
        return {name: _text(getattr(site, name)) for name in _FACTS}

    yield from _differing(facts(before), facts(after), f"{before.site}: ")


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class _Key:
    policy: str
    adapters: tuple[str, ...]


def _routes(before: SiteReport, after: SiteReport) -> Iterator[RouteChange]:
    old = {_Key(r.policy, r.adapters): r for r in before.routes}
    for route in after.routes:
        was = old.get(_Key(route.policy, route.adapters))
        if was is not None and _label(was) != _label(route):
            yield RouteChange(
                site=before.site,
                policy=route.policy,
                adapters=route.adapters,
                before=_label(was),
                after=_label(route),
                reason=route.reason,
                bytes_before=was.bytes_per_token,
                bytes_after=route.bytes_per_token,
                worse=_rank(route) < _rank(was),
            )


def _label(route: RouteReport) -> str:
    return f"{route.route} by {route.producer}" if route.producer else route.route


def _rank(route: RouteReport) -> tuple[int, bool]:
    return _ORDER.get(route.route, 0), not route.emulated


def _adapter(before: AdapterReport, after: AdapterReport) -> Iterator[Changed]:
    def facts(adapter: AdapterReport) -> dict[str, str]:
        found = {name: str(getattr(adapter, name)) for name in ("digest", "rank", "peft_type")}
        for cost in adapter.costs:
            name = f"extra bytes/token under {cost.policy}" if cost.policy else "extra bytes/token"
            found[name] = f"{cost.extra_bytes_per_token:,.0f}"
        return found

    yield from _differing(facts(before), facts(after), f"{before.name}: ")


def _kernels(before: AuditReport, after: AuditReport) -> Iterator[Changed]:
    def facts(report: AuditReport) -> dict[str, str]:
        counts: dict[str, int] = {}
        for kernel in report.kernels:
            counts[kernel.name] = counts.get(kernel.name, 0) + kernel.linears
        return {name: f"{linears} linears" for name, linears in counts.items()}

    yield from _differing(facts(before), facts(after))


# --- for a person --------------------------------------------------------------------------------


def _table(title: str, changes: Iterable[Changed]) -> Table:
    table = Table("what", "before", "after", title=title, title_justify="left")
    for change in changes:
        table.add_row(Text(change.what), Text(change.before), Text(change.after))
    return table


def _routes_table(changes: Iterable[RouteChange]) -> Table:
    """Those that differ in nothing but the number of their layer, together."""
    table = Table(
        "site", "adapters", "before", "after", "bytes/token", "why",
        title="routes", title_justify="left",
    )  # fmt: skip
    groups: dict[tuple[object, ...], list[RouteChange]] = {}
    for change in changes:
        name, reason = without_index(change.site), without_index(change.reason)
        key = (name, change.policy, change.adapters, change.before, change.after, reason)
        groups.setdefault(key, []).append(change)
    for group in groups.values():
        first, several = group[0], len(group) > 1
        name = f"{without_index(first.site)} (x{len(group)})" if several else first.site
        table.add_row(
            Text(name),
            Text(adapter_set(first.adapters)),
            first.before,
            Text(first.after, style="red" if first.worse else "green"),
            f"{first.bytes_before:,.0f} to {first.bytes_after:,.0f}",
            Text(without_index(first.reason) if several else first.reason),
        )
    return table
