"""Numeric readiness: before a model serves, its planned routes are compared with the unfused one.

What differs is taken out of service, logged and counted; serving goes on unfused there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..adapters.ready import slots_by_place
from ..core.errors import AdapterError, ConfigError
from ..core.report import ReportPart
from ..core.route import Route
from ..fusion.probe import Differing, Probed, ProbeRows, probe_site
from ..fusion.site import Site
from ..linear.batch import Batch
from ..policies.own import AbsorbedPolicy, DualPolicy, DynamicPolicy
from ..policies.plan import OutOfService, Plan

if TYPE_CHECKING:
    from .model import ServedModel

_logger = logging.getLogger("branchline.self_check")

#: With more adapters than this, only those in slots are checked one by one.
_MOST_CHECKED = 32
#: Between them they take every route that a site may take.
_EVERY_ROUTE = (AbsorbedPolicy(), DualPolicy(), DynamicPolicy())


class NumericDifference(ReportPart):
    """An output of one site that its planned route and its unfused one do not agree on.

    Attributes:
        site: its name.
        kind: "activation" or "norm".
        route: that was planned.
        producer: that was planned.
        consumer: the linear that reads the output.
        adapters: of the batch; empty for base rows.
        packed: whether each token was a row, as in continuous batching.
        what: "codes", "scale", "raw rows", "shrunk rows", "output", or "error".
        differing: how many elements differ.
        compared: of how many.
        first: index of the first; empty where the whole differs.
        got: the first, as text.
        wanted: what the unfused route makes.
    """

    site: str
    kind: str
    route: str
    producer: str
    consumer: str
    adapters: tuple[str, ...]
    packed: bool
    what: str
    differing: int
    compared: int
    first: tuple[int, ...]
    got: str
    wanted: str

    def __str__(self) -> str:
        beside = f" with {', '.join(self.adapters)}" if self.adapters else ""
        first = f"; first at {list(self.first)}: {self.got}, not {self.wanted}"
        return (
            f"{self.route} by {self.producer} at {self.site}{beside}: {self.reason}"
            f"{first if self.first else ''}"
        )

    @property
    def reason(self) -> str:
        """What differs, for whom, and how much of it."""
        if self.what == "error":
            return self.got
        return (
            f"{self.differing} of {self.compared} elements of {self.what} for {self.consumer} "
            "differ from the unfused route's"
        )


class Withdrawal(ReportPart):
    """A route of one site that is out of service, and why."""

    site: str
    route: str
    producer: str
    reason: str


class Unchecked(ReportPart):
    """Adapters whose routes could not be checked, and why."""

    adapters: tuple[str, ...]
    reason: str


class Readiness(ReportPart):
    """What `check_numerics` returns.

    Attributes:
        epoch: of the plans that were checked.
        policy: that made them.
        adapters: that were checked, sorted.
        sites: how many were compared on some route.
        routes: comparisons of one site in one batch.
        values: elements compared.
        differences: what was found.
        out_of_service: all that is out of service by now, earlier findings included.
        unchecked: what could not be compared now.
        saturated: by kind of site, the share of FP8 codes at the end of the range, of probe rows of
            usual size.
        seconds: it took.
    """

    epoch: int
    policy: str
    adapters: tuple[str, ...]
    sites: int
    routes: int
    values: int
    differences: tuple[NumericDifference, ...]
    out_of_service: tuple[Withdrawal, ...]
    unchecked: tuple[Unchecked, ...]
    saturated: dict[str, float]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing differs that was in service; serving is right in either case."""
        return not self.differences


def check_numerics(
    served: ServedModel,
    *,
    adapters: Iterable[str] | None = None,
    rows: int = 4,
    seed: int = 0,
) -> Readiness:
    """Compare every planned route with the unfused one, and take out of service what differs.

    A few made-up rows go through each site by its producer, and by the raw activation that every
    linear quantises itself; codes, scales, raw rows, shrunk rows and the linears' outputs must
    be the same bytes (see `probe_site` for GPUs).  Checked are base rows, each adapter beside a
    base row in a packed batch, and all together (those that fit the slots at one time) as rows, as
    plans of the policy in force route them.
    Counters of what ran stay as they are.  It may run beside batches, in any thread; adapters are
    kept in slots for as long as their probes take.

    Args:
        served: not unwrapped.
        adapters: compare only what these add, after a load: each alone, and all together with
            those in slots.  Without a slot, one takes that of an idle one.  None for everything:
            base rows and all adapters that are read (of more than 32, those in slots).
        rows: of each request, one or more; see `ROW_KINDS`.
        seed: of the made-up rows.

    Raises:
        ConfigError: `rows` is not positive, `adapters` is one text, or the model was unwrapped.
        AdapterNotFoundError: an adapter is unknown.
    """
    if rows < 1:
        raise ConfigError(f"rows={rows}", "compares nothing", "pass 1 or more")
    if isinstance(adapters, str):
        raise ConfigError(f"adapters {adapters!r}", "is one text", "pass names, such as ['sql']")
    served.adapters.refuse_if_closed()
    started = time.perf_counter()
    check = _Check(served, ProbeRows(rows, seed))
    if adapters is None:
        check.base()
        check.adapters(check.loaded(), newly=False)
    else:
        names = tuple(dict.fromkeys(adapters))
        for name in names:
            served.adapters.info(name)
        check.adapters(names, newly=True)
    check.withdraw()
    return check.report(time.perf_counter() - started)


class _Check:
    """One check; what it finds is gathered here."""

    def __init__(self, served: ServedModel, rows: ProbeRows) -> None:
        self._served = served
        self._rows = rows
        self._planner = served.planner
        self._registry = served.registry
        self._epoch = served.registry.epoch
        self._differences: list[NumericDifference] = []
        self._faults: list[OutOfService] = []
        self._unchecked: list[Unchecked] = []
        self._checked: set[str] = set()
        self._sites: set[int] = set()
        self._routes = 0
        self._values = 0
        self._usual: Counter[str] = Counter()
        self._saturated: Counter[str] = Counter()

    # --- what is checked ------------------------------------------------------------------------

    def loaded(self) -> tuple[str, ...]:
        """Adapters that a whole check compares one by one."""
        known = [info for info in self._served.adapters.list() if info.digest]
        few = len(known) <= _MOST_CHECKED
        return tuple(info.name for info in known if few or info.slot is not None)

    def base(self) -> None:
        """Base rows: the routes of batches without adapters, and of what adapters leave alone."""
        for plan, sites in self._plans({}):
            self._probe(Batch(plan), sites, ())

    def adapters(self, names: Sequence[str], *, newly: bool) -> None:
        """Each alone and all together, at the sites whose linears they branch from.

        Args:
            names: known ones.
            newly: together means, with the others that have slots.
        """
        touched: set[int] = set()
        for name in names:
            touched |= self._set((name,), None, packed=True)
        infos = self._served.adapters.list()
        in_slots = tuple(info.name for info in infos if info.slot is not None)
        # Those that fit the slots at one time; a batch cannot have more.
        together = in_slots if newly else tuple(name for name in in_slots if name in names)
        if together and touched:
            self._set(together, touched, packed=False)

    def _set(self, names: tuple[str, ...], only: set[int] | None, *, packed: bool) -> set[int]:
        """Compare a batch of one row for each name and a base row; gives the sites they act at."""
        manager = self._served.adapters
        try:
            with manager.held_in_slots(names) as versions:
                plans = self._plans(
                    {version.key: name for version, name in zip(versions, names, strict=True)}
                )
                chosen, places = (*versions, None), len(self._registry.places)
                device = next(iter(self._registry)).device
                slots = slots_by_place(chosen, places, device)
                acted = {
                    site.index
                    for site in self._acted_on(plans[0][0])
                    if only is None or site.index in only
                }
                for plan, sites in plans:
                    routed = [site for site in sites if site.index in acted]
                    self._probe(self._batch(plan, slots, packed), routed, names)
        except AdapterError as error:
            self._unchecked.append(Unchecked(adapters=names, reason=str(error)))
            return set()
        self._checked.update(names)
        return acted

    def _batch(self, plan: Plan, slots: torch.Tensor, packed: bool) -> Batch:
        if packed:
            slots = slots.repeat_interleave(self._rows.rows, dim=1)
        tokens = None if packed else self._rows.rows
        return Batch(plan, slots.shape[1], slots, packed=packed, row_tokens=tokens)

    def _plans(self, live: Mapping[int, str]) -> list[tuple[Plan, list[Site]]]:
        """Plans for these adapters, each with the sites whose route no plan before it has.

        Where the route depends on the size of a batch, those are all that a batch may take.
        """
        planner = self._planner
        found: list[tuple[Plan, list[Site]]] = []
        seen: set[tuple[int, Route]] = set()
        for policy in _EVERY_ROUTE if planner.policy.by_batch else (planner.policy,):
            plan = planner.plan(live, policy)
            routed = [
                site
                for site in planner.sites
                if plan.routes[site.index] != Route.UNFUSED
                and (site.index, plan.routes[site.index]) not in seen
            ]
            seen |= {(site.index, plan.routes[site.index]) for site in routed}
            found.append((plan, routed))
        return found

    def _acted_on(self, plan: Plan) -> list[Site]:
        return [
            site
            for site in self._planner.sites
            if any(plan.branched[layer.index] for layer in site.layers)
        ]

    # --- comparing ------------------------------------------------------------------------------

    def _probe(self, batch: Batch, sites: Sequence[Site], names: tuple[str, ...]) -> None:
        for site in sites:
            probed = probe_site(site, batch, self._rows)
            self._sites.add(site.index)
            self._routes += 1
            self._values += probed.elements
            self._count_saturation(site, probed)
            for differing in probed.differing:
                self._found(site, batch, names, differing)

    def _count_saturation(self, site: Site, probed: Probed) -> None:
        self._usual[site.facts.kind] += probed.usual
        self._saturated[site.facts.kind] += probed.saturated

    def _found(
        self, site: Site, batch: Batch, names: tuple[str, ...], differing: Differing
    ) -> None:
        plan = batch.plan
        assert isinstance(plan, Plan)
        planned, found = plan.sites[site.index], differing.found
        difference = NumericDifference(
            site=site.facts.name,
            kind=site.facts.kind,
            route=str(planned.route),
            producer=planned.producer,
            consumer=differing.consumer,
            adapters=names,
            packed=batch.packed,
            what=differing.what,
            differing=found.differences,
            compared=found.elements,
            first=found.place,
            got=found.got,
            wanted=found.wanted,
        )
        self._differences.append(difference)
        fault = OutOfService(site.facts.name, planned.route, planned.producer, difference.reason)
        self._faults.append(fault)

    # --- the end --------------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Take what differs out of service; batches are planned anew."""
        for difference in self._differences:
            _logger.error("%s", difference)
        for fault in self._planner.withdraw(self._faults):
            _logger.error(
                "%s by %s at %s is out of service: %s",
                fault.route,
                fault.producer,
                fault.site,
                fault.reason,
            )

    def report(self, seconds: float) -> Readiness:
        """What was found."""
        return Readiness(
            epoch=self._epoch,
            policy=self._planner.policy.name,
            adapters=tuple(sorted(self._checked)),
            sites=len(self._sites),
            routes=self._routes,
            values=self._values,
            differences=tuple(self._differences),
            out_of_service=tuple(
                Withdrawal(
                    site=fault.site,
                    route=str(fault.route),
                    producer=fault.producer,
                    reason=fault.reason,
                )
                for fault in self._planner.out_of_service
            ),
            unchecked=tuple(self._unchecked),
            saturated={
                kind: self._saturated[kind] / codes for kind, codes in self._usual.items() if codes
            },
            seconds=round(seconds, 4),
        )
