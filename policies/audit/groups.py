"""What is alike in a report, told once: layers that differ in their number alone, adapters that
cost the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .report import AdapterReport, AuditReport, RouteReport, SiteReport

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def without_index(name: str) -> str:
    """The name with every number between dots replaced."""
    return _INDEX.sub("*", name)


@dataclass(frozen=True)
class SiteGroup:
    """Sites that differ in nothing but the number of their layer.

    Attributes:
        name: with a star in the place of the number, where there are several.
        sites: in the order of the report.
        layers: their numbers, such as "0-11, 14"; empty where there is one site alone.
    """

    name: str
    sites: tuple[SiteReport, ...]
    layers: str

    @property
    def first(self) -> SiteReport:
        """One that stands for all."""
        return self.sites[0]

    @property
    def share(self) -> float:
        """Of the model's activation traffic, all of them together."""
        return sum(site.share for site in self.sites)

    def reason(self, route: RouteReport) -> str:
        """The reason of one of the first's routes, as it holds for all of them."""
        return without_index(route.reason) if len(self.sites) > 1 else route.reason

    def ran(self) -> dict[str, int]:
        """Calls by route, of all of them."""
        counts: dict[str, int] = {}
        for site in self.sites:
            for route, count in site.ran.items():
                counts[route] = counts.get(route, 0) + count
        return counts


def site_groups(sites: Iterable[SiteReport]) -> Iterator[SiteGroup]:
    """Sites, those that are alike together, in the order of the first of each."""
    groups: dict[object, list[SiteReport]] = {}
    for site in sites:
        key = (
            without_index(site.site),
            site.semantics,
            site.key,
            site.columns,
            tuple(map(without_index, site.consumers)),
            tuple(_route_key(route) for route in site.routes),
            tuple(site.mismatches),
        )
        groups.setdefault(key, []).append(site)
    for group in groups.values():
        several = len(group) > 1
        name = without_index(group[0].site) if several else group[0].site
        yield SiteGroup(name, tuple(group), _ranges(group) if several else "")


def _route_key(route: RouteReport) -> tuple[object, ...]:
    # One adapter may sit on other linears of another layer: their names are part of the reason.
    reason = without_index(route.reason)
    return (route.policy, route.adapters, route.route, route.producer, reason, route.blame)


def _ranges(sites: Iterable[SiteReport]) -> str:
    numbers = [int(found[0]) for site in sites if (found := _INDEX.search(site.site))]
    parts: list[str] = []
    begin = previous = None
    for number in [*sorted(numbers), None]:
        if previous is not None and number != previous + 1:
            parts.append(f"{begin}" if begin == previous else f"{begin}-{previous}")
            begin = number
        begin = number if begin is None else begin
        previous = number
    return ", ".join(parts)


@dataclass(frozen=True)
class AdapterGroup:
    """Adapters that cost the same.

    Attributes:
        names: of them.
        first: one that stands for all.
    """

    names: tuple[str, ...]
    first: AdapterReport

    def label(self, shown: int = 8) -> str:
        """A few of the names, and how many more there are."""
        more = len(self.names) - shown
        few = ", ".join(self.names[:shown])
        return f"{few} and {more} more" if more > 0 else few


def adapter_groups(report: AuditReport) -> tuple[AdapterGroup, ...]:
    """Adapters, those that cost the same together, the dearest first."""
    groups: dict[object, list[AdapterReport]] = {}
    for adapter in report.adapters:
        groups.setdefault((adapter.costs, adapter.advice), []).append(adapter)
    found = [AdapterGroup(tuple(a.name for a in group), group[0]) for group in groups.values()]
    found.sort(key=lambda group: -group.first.costs[0].extra_bytes_per_token)
    return tuple(found)


def adapter_set(names: tuple[str, ...]) -> str:
    """What a set is called."""
    return ", ".join(names) or "(no adapter)"
