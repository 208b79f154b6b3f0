"""What the page shows, gathered from engine, adapters and audit: plain values for a template."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...adapters.version import AdapterInfo
from ...core.errors import AdapterNotFoundError
from ...core.route import Route
from ...policies.audit import AuditReport, RouteReport, SiteReport
from ..engine.requests import EngineStats
from .page_numbers import Rates, Throughput, duration, readable_bytes

if TYPE_CHECKING:
    from .state import ServerState

MOST_LISTED = 200

_AUDIT_TRIES = 4
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=[.\s,:;)]|$)")


@dataclass(frozen=True)
class AdapterRow:
    """One adapter.

    Attributes:
        info: its line of the listing.
        size: readable.
        used: how long ago it was used, readable; "never".
        running: answers that run on it now.
        waiting: answers that wait for it.
        answers: that ended since the server began; None where they are not counted by themselves.
        sites_unfused: sites that it alone keeps from being fused; None where that is not known.
    """

    info: AdapterInfo
    size: str
    used: str
    running: int
    waiting: int
    answers: int | None
    sites_unfused: int | None


@dataclass(frozen=True)
class BarPart:
    """Part of a bar of a hundred.

    Attributes:
        route: of the calls.
        calls: how many.
        start: where it begins.
        width: how much it takes.
    """

    route: str
    calls: int
    start: float
    width: float


@dataclass(frozen=True)
class RouteRow:
    """Sites that differ in nothing but the number of their layer.

    Attributes:
        name: with * for the number.
        kind: "activation" or "norm".
        semantics: what they compute; "" where nothing known equals it.
        sites: how many.
        base: their route for base rows.
        live: their route for the live adapters.
        reason: of `live`.
        producer: of `live`; "" where unfused.
        emulated: the producer saves nothing.
        blame: the adapters that `live` is so for.
        shares: of what ran so far.
        calls: that ran so far.
        fallbacks: of these, by the definition in the place of the planned producer.
    """

    name: str
    kind: str
    semantics: str
    sites: int
    base: str
    live: str
    reason: str
    producer: str
    emulated: bool
    blame: tuple[str, ...]
    shares: tuple[BarPart, ...]
    calls: int
    fallbacks: int


@dataclass(frozen=True)
class LiveView:
    """All that is shown.

    Attributes:
        status: "serving", "stopping" or "engine stopped".
        problem: why it does not serve; else empty.
        uptime: readable.
        policy: of the routes.
        platform: what the model runs on.
        rates: of the engine; None for a server without one.
        stats: of the engine; None likewise.
        cache_share: of the KV cache, 0 to 1.
        adapters: those that are listed.
        matching: how many names there are that the search finds.
        named: how many names there are.
        slots: on the device, spare ones included.
        slots_taken: of them.
        host_bytes: of adapters, readable.
        live_adapters: those that the routes are shown for.
        running_now: they are those of answers that run now; else those in slots.
        routes: of the sites.
        out_of_service: routes that the self-check took away, as text.
        check: what the last self-check found, as text.
    """

    status: str
    problem: str
    uptime: str
    policy: str
    platform: str
    rates: Rates | None
    stats: EngineStats | None
    cache_share: float
    adapters: tuple[AdapterRow, ...]
    matching: int
    named: int
    slots: int
    slots_taken: int
    host_bytes: str
    live_adapters: tuple[str, ...]
    running_now: bool
    routes: tuple[RouteRow, ...]
    out_of_service: tuple[str, ...]
    check: str


class PageSource:
    """Gathers what the page shows; any thread.

    Args:
        state: of the server.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._throughput = Throughput(state.started_at)

    def view(self, search: str = "") -> LiveView:
        """What there is now.

        Args:
            search: adapters are listed whose names contain it.

        Raises:
            AdapterNotFoundError: adapters went faster than they could be looked at.
        """
        state = self._state
        engine = state.engine
        stats = None if engine is None else engine.stats()
        infos = state.served.adapters.list()
        live, running_now = _live_adapters(infos, stats)
        report, live = self._audit(live)
        memory = state.served.adapters.memory()
        found = [info for info in infos if search.casefold() in info.name.casefold()]
        status, problem = self._status()
        now = time.monotonic()
        return LiveView(
            status=status,
            problem=problem,
            uptime=duration(now - state.started_at),
            policy=report.policy,
            platform=report.platform,
            rates=None if stats is None else self._throughput.rates(stats, now),
            stats=stats,
            cache_share=stats.used_blocks / stats.blocks if stats and stats.blocks else 0.0,
            adapters=self._rows(found, stats, report),
            matching=len(found),
            named=len(infos),
            slots=memory.slots,
            slots_taken=memory.slots_taken,
            host_bytes=readable_bytes(memory.host_bytes),
            live_adapters=live,
            running_now=running_now,
            routes=self._routes(report),
            out_of_service=self._out_of_service(),
            check=self._check(),
        )

    # --- the audit ------------------------------------------------------------------------------

    def _audit(self, live: tuple[str, ...]) -> tuple[AuditReport, tuple[str, ...]]:
        """The audit for base rows and the live adapters; and the latter."""
        state = self._state
        gone: AdapterNotFoundError | None = None
        for _ in range(_AUDIT_TRIES):
            try:
                return state.audits.of(live), live
            except AdapterNotFoundError as error:
                # One was unloaded since it was listed.
                gone = error
                names = {info.name for info in state.served.adapters.list() if info.digest}
                live = tuple(name for name in live if name in names)
        assert gone is not None
        raise gone

    def _routes(self, report: AuditReport) -> tuple[RouteRow, ...]:
        sites = self._state.served.planner.sites
        grouped: dict[tuple[object, ...], list[int]] = {}
        for index, site in enumerate(report.sites):
            grouped.setdefault(_alike(site), []).append(index)
        rows = []
        for indices in grouped.values():
            first = report.sites[indices[0]]
            ran: Counter[Route] = Counter()
            fallbacks = 0
            for index in indices:
                ran.update(sites[index].counters.routes())
                fallbacks += sum(sites[index].counters.fallbacks().values())
            rows.append(_route_row(first, len(indices), ran, fallbacks))
        return tuple(rows)

    # --- the rest -------------------------------------------------------------------------------

    def _rows(
        self, infos: Sequence[AdapterInfo], stats: EngineStats | None, report: AuditReport
    ) -> tuple[AdapterRow, ...]:
        running: Mapping[str, int] = {} if stats is None else stats.running_by_adapter
        waiting: Mapping[str, int] = {} if stats is None else stats.waiting_by_adapter
        unfused = {adapter.name: adapter.sites_unfused for adapter in report.adapters}
        answers = self._state.metrics.answers()
        now = time.time()
        first = list(infos)
        # Rows that stay where they are can be clicked; only a list that is cut is sorted.
        if len(first) > MOST_LISTED:
            first.sort(key=lambda info: (info.name not in running, info.slot is None))
        return tuple(
            AdapterRow(
                info,
                readable_bytes(info.nbytes),
                "never" if info.last_use is None else f"{duration(now - info.last_use)} ago",
                running.get(info.name, 0),
                waiting.get(info.name, 0),
                answers.get(info.name),
                unfused.get(info.name),
            )
            for info in first[:MOST_LISTED]
        )

    def _status(self) -> tuple[str, str]:
        engine = self._state.engine
        if self._state.stopping:
            return "stopping", "running answers are finished; new requests are refused"
        if engine is not None and not engine.alive:
            return "engine stopped", "" if engine.error is None else str(engine.error)
        return "serving", ""

    def _out_of_service(self) -> tuple[str, ...]:
        return tuple(
            f"{fault.route} by {fault.producer} at {fault.site}: {fault.reason}"
            for fault in self._state.served.planner.out_of_service
        )

    def _check(self) -> str:
        readiness = self._state.readiness
        if readiness is None:
            return "No self-check has run."
        what = f"{readiness.routes} routes of {readiness.sites} sites"
        if readiness.ok:
            return f"The last self-check compared {what}: all give the unfused route's bytes."
        return f"The last self-check compared {what}: {len(readiness.differences)} outputs differ."


def _live_adapters(
    infos: Sequence[AdapterInfo], stats: EngineStats | None
) -> tuple[tuple[str, ...], bool]:
    running = () if stats is None else stats.running_by_adapter
    now = tuple(sorted(info.name for info in infos if info.name in running and info.digest))
    if now:
        return now, True
    return tuple(sorted(info.name for info in infos if info.slot is not None)), False


def _alike(site: SiteReport) -> tuple[object, ...]:
    routes = tuple((r.route, r.producer, r.emulated, _no_numbers(r.reason)) for r in site.routes)
    return (_no_numbers(site.site), site.kind, site.semantics, routes)


def _no_numbers(text: str) -> str:
    return _LAYER_NUMBER.sub("*", text)


def _route_row(site: SiteReport, sites: int, ran: Counter[Route], fallbacks: int) -> RouteRow:
    base: RouteReport = site.routes[0]
    live = site.routes[-1]
    several = sites > 1
    return RouteRow(
        name=_no_numbers(site.site) if several else site.site,
        kind=site.kind,
        semantics=site.semantics or "",
        sites=sites,
        base=base.route,
        live=live.route,
        reason=_no_numbers(live.reason) if several else live.reason,
        producer=live.producer,
        emulated=live.emulated,
        blame=live.blame,
        shares=shares(ran),
        calls=ran.total(),
        fallbacks=fallbacks,
    )


def shares(ran: Mapping[Route, int]) -> tuple[BarPart, ...]:
    """What ran as parts of a bar of a hundred; routes that did not run have none."""
    total, start, parts = sum(ran.values()), 0.0, []
    for route in (Route.FUSED, Route.ABSORBED, Route.DUAL, Route.UNFUSED):
        calls = ran.get(route, 0)
        if calls:
            width = 100.0 * calls / total
            parts.append(BarPart(str(route), calls, round(start, 3), round(width, 3)))
            start += width
    return tuple(parts)
