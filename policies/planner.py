"""The planner: makes a plan for a set of adapters, and keeps it until the epoch advances."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from ..core.errors import BranchlineError, ConfigError, KernelUnavailableError
from ..core.platform import Platform
from ..core.route import Route
from ..core.selection import Rejection
from ..fusion.producers.base import ProducerRequest
from ..fusion.registry import ProducerRegistry, Selection
from ..fusion.site import Site
from ..fusion.traffic import traffic_of
from ..linear.batch_class import BatchClass
from ..linear.branching import Place
from ..linear.registry import LayerRegistry, RawReader
from ..linear.routed import RoutedLayer
from .base import Policy, RouteChoice, SiteState, allowed_routes
from .obstacles import obstacle_of
from .own import DynamicPolicy
from .plan import OutOfService, Plan, SitePlan
from .reasons import ReasonCode, code_of

_KEPT_PLANS = 1024
_BY_ROW = frozenset({Route.DUAL, Route.ABSORBED})


@dataclass(frozen=True)
class _PassedOver(Selection):
    """Of a site that is unfused because what its policy preferred would only be emulated."""


@dataclass(frozen=True)
class _Withdrawn(Selection):
    """Of a producer that was taken out of service; the site is unfused then, by no other route."""


class Planner:
    """Plans for sets of adapters, made once each.

    Args:
        registry: the layers and who reads them raw.
        sites: in the order of their index.
        producers: what may be chosen.
        platform: facts about the device.
        policy: chooses among the possible routes.
        adapters_possible: whether an adapter can ever be loaded (slots exist).
        lora_dtype: dtype of the adapter slots; None where there are none.
        force: name of the only producer that may be chosen, or None.
    """

    def __init__(
        self,
        registry: LayerRegistry,
        sites: tuple[Site, ...],
        producers: ProducerRegistry,
        platform: Platform,
        policy: Policy,
        *,
        adapters_possible: bool,
        lora_dtype: torch.dtype | None = None,
        force: str | None = None,
    ) -> None:
        self.registry = registry
        self.sites = sites
        self.platform = platform
        self.policy = policy
        self._producers = producers
        self._adapters_possible = adapters_possible
        self._lora_dtype = lora_dtype
        self._force = force
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        self._lock = threading.Lock()
        self._out_of_service: Mapping[tuple[str, Route, str], OutOfService] = {}
        self._bound: dict[Policy, Policy] = {}
        # What it cannot do on this device is refused now.
        self._on_device(policy)

    @property
    def out_of_service(self) -> tuple[OutOfService, ...]:
        """What `withdraw` was told so far."""
        return tuple(self._out_of_service.values())

    def withdraw(self, faults: Iterable[OutOfService]) -> tuple[OutOfService, ...]:
        """Plan these producers no more; where one would be chosen, the site is unfused.

        Batches in flight go on with their plans, later ones get new ones.

        Args:
            faults: each with its reason; of what is out of service already, the first one stays.

        Returns:
            those that were in service before.
        """
        with self._lock:
            known = self._out_of_service
            given = {(fault.site, fault.route, fault.producer): fault for fault in faults}
            added = {key: fault for key, fault in given.items() if key not in known}
            self._out_of_service = {**known, **added}
        if added:
            names = ", ".join(dict.fromkeys(fault.site for fault in added.values()))
            self.registry.advance(f"taken out of service: routes of {names}")
        return tuple(added.values())

    def plan(
        self,
        live: Mapping[int, str],
        policy: Policy | None = None,
        batch: BatchClass | None = None,
    ) -> Plan:
        """The plan for batches whose rows use exactly the adapters `live`.

        Args:
            live: identity of each loaded version -> its name.
            policy: plan by another policy than the planner's own, for the audit.
            batch: class of the batches, for policies that ask for it; None for one token for each
                adapter, or one token.

        Raises:
            KernelUnavailableError: the forced producer cannot run for a site.
            ConfigError: the policy chose what it may not choose.
        """
        given = policy or self.policy
        bound = self._on_device(given)
        if not bound.by_batch:
            batch = None
        elif batch is None:
            batch = BatchClass.of(max(len(live), 1), len(live), known=False)
        key = (self.registry.epoch, given, frozenset(live), self.registry.hooks_unseen(), batch)
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                return found
        made = self._make(live, bound, batch, epoch=key[0])
        with self._lock:
            self._plans[key] = made
            while len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        return made

    def plan_batch(
        self, live: Mapping[int, str], mixtures: bool, batch: BatchClass | None = None
    ) -> Plan:
        """The plan for a batch of the adapters `live`.

        Args:
            live: as in `plan`.
            mixtures: a row takes several adapters at once, while raw and shrunk rows beside codes
                are made for one adapter a row: sites with a raw reader are unfused then.
            batch: as in `plan`.

        Raises:
            KernelUnavailableError, ConfigError: as in `plan`.
        """
        by_row = bool(self.policy.routes & _BY_ROW)
        return self.plan(live, DynamicPolicy() if mixtures and by_row else None, batch)

    def _on_device(self, policy: Policy) -> Policy:
        bound = self._bound.get(policy)
        if bound is None:
            bound = self._bound[policy] = _bound(policy, self.platform)
        return bound

    def _make(
        self, live: Mapping[int, str], policy: Policy, batch: BatchClass | None, epoch: int
    ) -> Plan:
        planned = [self._plan_site(site, live, policy, batch) for site in self.sites]
        parts = tuple(self._parts(place, live) for place in self.registry.places.values())
        return Plan(
            epoch=epoch,
            policy=policy.name,
            adapters=tuple(sorted(live.values())),
            sites=tuple(plan for plan, _ in planned),
            routes=tuple(plan.route for plan, _ in planned),
            producers=tuple(selection.producer for _, selection in planned),
            branched=tuple(map(bool, parts)),
            parts=parts,
            shrink_ranks=tuple(self._shrink_rank(layer, live) for layer in self.registry),
            batch=batch,
        )

    def _plan_site(
        self, site: Site, live: Mapping[int, str], policy: Policy, batch: BatchClass | None
    ) -> tuple[SitePlan, Selection]:
        readers = self.registry.raw_readers(site.layers[0], live.keys())
        obstacle = obstacle_of(site)
        # Where no producer exists, no adapter is to blame.
        if obstacle is None:
            fused = self._select(site, Route.FUSED)
        else:
            fused = Selection(None, (), obstacle.reason)
        code = obstacle.code if obstacle else ReasonCode.NO_PRODUCER
        if fused.producer is None:
            choice, selection = RouteChoice(Route.UNFUSED, fused.reason), fused
            if isinstance(fused, _Withdrawn):
                code = ReasonCode.OUT_OF_SERVICE
        else:
            state = self._state(site, live, readers, batch)
            choices = _checked(policy, state, site, _chosen(policy, state))
            choice, selection = self._first_possible(site, choices, readers, fused)
            code = code_of(choice.route, readers)
            if isinstance(selection, _Withdrawn):
                code = ReasonCode.OUT_OF_SERVICE
            elif isinstance(selection, _PassedOver):
                code = ReasonCode.EMULATED
        return _site_plan(site, choice, code, selection, readers), selection

    def _state(
        self,
        site: Site,
        live: Mapping[int, str],
        readers: tuple[RawReader, ...],
        batch: BatchClass | None,
    ) -> SiteState:
        facts, key = site.facts, site.contract.key
        traffic = None
        if batch is not None:
            assert key is not None
            traffic = traffic_of(
                site,
                key,
                self.registry,
                live,
                tokens=batch.tokens,
                adapter_tokens=batch.adapter_tokens,
                shrink_width=sum(self._shrink_rank(layer, live) for layer in site.layers),
            )
        return SiteState(
            readers, self._may_carry_adapters(site),
            facts.kind, facts.columns, facts.dtype, key, batch, traffic,
        )  # fmt: skip

    def _first_possible(
        self,
        site: Site,
        choices: tuple[RouteChoice, ...],
        readers: tuple[RawReader, ...],
        fused: Selection,
    ) -> tuple[RouteChoice, Selection]:
        """The first choice that a producer serves; its reason says why those before it failed."""
        rejected: tuple[Rejection, ...] = ()
        failed: list[str] = []
        emulated = False
        for choice in choices:
            if choice.route == Route.UNFUSED:
                selection = Selection(None)
            elif choice.route == Route.FUSED:
                selection = fused
            else:
                selection = self._select(site, choice.route, readers)
            rejected = (*rejected, *selection.rejected)
            if isinstance(selection, _Withdrawn):
                reason = "; ".join([*failed, selection.reason])
                return RouteChoice(Route.UNFUSED, reason), _Withdrawn(None, rejected)
            if _only_emulated(selection, fused):
                emulated = True
                failed.append(f"not {choice.route}: only emulated")
                continue
            if selection.producer is not None or choice.route == Route.UNFUSED:
                reason = "; ".join([choice.reason, *failed])
                passed_over = emulated and choice.route == Route.UNFUSED
                kind = _PassedOver if passed_over else Selection
                return RouteChoice(choice.route, reason), kind(selection.producer, rejected)
            failed.append(f"not {choice.route}: {selection.reason}")
        return RouteChoice(Route.UNFUSED, "; ".join(failed)), Selection(None, rejected)

    def _may_carry_adapters(self, site: Site) -> bool:
        return self._adapters_possible and any(layer.takes_branches for layer in site.layers)

    def _select(self, site: Site, route: Route, readers: tuple[RawReader, ...] = ()) -> Selection:
        key, semantics = site.contract.key, site.facts.semantics
        assert key is not None
        assert semantics is not None
        absorbed = route == Route.ABSORBED
        request = ProducerRequest(
            semantics,
            key,
            route,
            site.facts.dtype,
            site.facts.columns,
            self.platform,
            max((reader.shrink_rank or 0 for reader in readers), default=0) if absorbed else 0,
            self._lora_dtype if absorbed else None,
        )
        try:
            selection = self._producers.select(request, self._force)
        except KernelUnavailableError as error:
            # Only FUSED says whether a forced producer can serve the site; from any other route the
            # policy has a way back.
            if route == Route.FUSED:
                raise
            return Selection(None, (Rejection(self._force or "", error.reason),), error.reason)
        name = "" if selection.producer is None else selection.producer.name
        fault = self._out_of_service.get((site.facts.name, route, name))
        if fault is None:
            return selection
        reason = f"out of service: {fault.reason}"
        return _Withdrawn(None, (*selection.rejected, Rejection(name, reason)), reason)

    def _parts(self, place: Place, live: Mapping[int, str]) -> int:
        held = (h.parts for h in self.registry.branches(place, live.keys()).values())
        return reduce(or_, held, 0)

    def _shrink_rank(self, layer: RoutedLayer, live: Mapping[int, str]) -> int:
        holders = self.registry.branches(layer, live.keys()).values()
        return max((holder.shrink_rank or 0 for holder in holders), default=0)


def _bound(policy: Policy, platform: Platform) -> Policy:
    with _foreign(policy):
        bound = policy.bound(platform)
    if not isinstance(bound, Policy):
        raise _broken(policy, f"bound() gave {bound!r}, which is no policy")
    return bound


def _chosen(policy: Policy, state: SiteState) -> tuple[RouteChoice, ...]:
    """What a policy answers, if it is an answer."""
    with _foreign(policy):
        answer = policy.choose(state)
    if not isinstance(answer, tuple) or not answer:
        raise _broken(policy, f"choose() gave {answer!r}, no tuple of choices")
    for choice in answer:
        if not isinstance(choice, RouteChoice) or not isinstance(choice.route, Route):
            raise _broken(policy, f"choose() gave {choice!r}, which is no choice of a route")
        if not isinstance(choice.reason, str) or not choice.reason:
            raise _broken(policy, f"choose() gave no reason for {choice.route}")
    return answer


@contextmanager
def _foreign(policy: Policy) -> Iterator[None]:
    """Code of other distributions may raise anything; whoever asked is told whose it was."""
    try:
        yield
    except BranchlineError:
        raise
    except Exception as error:
        raise _broken(policy, f"failed ({type(error).__name__}: {error})") from error


def _broken(policy: Policy, reason: str) -> ConfigError:
    return ConfigError(
        f"policy {policy.name!r} of {type(policy).__module__}",
        reason,
        "mend the policy (branchline.policies.testkit tells what is wrong), or choose another "
        "policy= (command line: --policy)",
    )


def _checked(
    policy: Policy, state: SiteState, site: Site, choices: tuple[RouteChoice, ...]
) -> tuple[RouteChoice, ...]:
    """The choices, none of which takes from a reader what it reads (I1)."""
    allowed = allowed_routes(state.raw_readers)
    for choice in choices:
        if choice.route not in allowed or choice.route not in policy.routes:
            readers = ", ".join(map(str, state.raw_readers)) or "nobody"
            possible = ", ".join(str(route) for route in sorted(allowed & policy.routes)) or "none"
            raise ConfigError(
                f"policy {policy.name!r}",
                f"chose {choice.route} for site {site.facts.name}, which {readers} reads raw; "
                f"it may choose: {possible}",
                "mend the policy (branchline.policies.testkit tells what is wrong), or choose "
                "another policy= (command line: --policy)",
            )
    return choices


def _only_emulated(selection: Selection, fused: Selection) -> bool:
    """Whether a route would be emulated where another one of the site is not."""
    ours, plain = selection.producer, fused.producer
    return ours is not None and ours.emulated and plain is not None and not plain.emulated


def _site_plan(
    site: Site,
    choice: RouteChoice,
    code: ReasonCode,
    selection: Selection,
    readers: tuple[RawReader, ...],
) -> SitePlan:
    chosen = selection.producer
    blame = dict.fromkeys(reader.name for reader in readers if reader.kind == "branch")
    return SitePlan(
        site=site.facts.name,
        route=choice.route,
        code=code,
        reason=choice.reason,
        producer=chosen.name if chosen else "",
        emulated=chosen.emulated if chosen else False,
        rejected=selection.rejected,
        key=site.common_key(),
        raw_readers=tuple(str(reader) for reader in readers),
        blame=tuple(blame),
    )
