"""Fusion policies: which route a site takes, from what is live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..core.errors import ConfigError
from ..core.route import Route
from ..linear.registry import RawReader


class RouteChoice(NamedTuple):
    """A policy's answer for one site."""

    route: Route
    reason: str


@dataclass(frozen=True)
class SiteState:
    """What a policy may look at.

    Attributes:
        raw_readers: who reads the site's output raw in this batch.
        may_carry_adapters: some consumer could take an adapter branch, now or ever.
    """

    raw_readers: tuple[RawReader, ...]
    may_carry_adapters: bool


class Policy(ABC):
    """Chooses a route for a site that could be fused; pure.

    Policies are values: two that are equal share their plans.
    """

    name: ClassVar[str]

    @abstractmethod
    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        """Routes in order of preference, each with its reason.

        The first one that a producer can serve is taken; where none can, the site is unfused.
        """


@dataclass(frozen=True)
class DynamicPolicy(Policy):
    """Fused unless a raw consumer is live for this batch."""

    name = "dynamic"

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        changers = [reader for reader in state.raw_readers if reader.changes_input]
        if changers:
            names = ", ".join(str(reader) for reader in changers)
            return (RouteChoice(Route.UNFUSED, f"changed before the linears by {names}"),)
        if state.raw_readers:
            return (RouteChoice(Route.UNFUSED, f"read raw by {_named(state)}"),)
        return (RouteChoice(Route.FUSED, "no raw reader is live"),)


@dataclass(frozen=True)
class StaticPolicy(Policy):
    """A layer that may ever carry an adapter is never fused: what engines do today."""

    name = "static"

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        if state.may_carry_adapters:
            return (RouteChoice(Route.UNFUSED, "a consumer may carry an adapter (policy static)"),)
        return DynamicPolicy().choose(state)


@dataclass(frozen=True)
class DualPolicy(Policy):
    """Where adapters are live, codes and, for their rows alone, the raw activation beside."""

    name = "dual"

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        (unfused_or_fused,) = DynamicPolicy().choose(state)
        readers = state.raw_readers
        if not readers or any(r.kind != "branch" or r.changes_input for r in readers):
            # A hook reads what it finds in the place of a tensor: raw rows beside are not there.
            # What is changed before it is multiplied cannot be codes already.
            return (unfused_or_fused,)
        return (RouteChoice(Route.DUAL, f"raw rows for {_named(state)}"), unfused_or_fused)


@dataclass(frozen=True)
class AbsorbedPolicy(Policy):
    """Where adapters are live, codes and the LoRA shrink of their rows; else as `DualPolicy`."""

    name = "absorbed"

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        others = [reader for reader in state.raw_readers if reader.shrink_rank is None]
        dual = DualPolicy().choose(state)
        if others or not state.raw_readers:
            if dual[0].route == Route.DUAL:
                names = ", ".join(str(reader) for reader in others)
                dual = (
                    RouteChoice(Route.DUAL, f"{dual[0].reason}; no LoRA shrink: {names}"),
                    *dual[1:],
                )
            return dual
        return (RouteChoice(Route.ABSORBED, f"absorbs {_named(state)}"), *dual)


def _named(state: SiteState) -> str:
    return ", ".join(str(reader) for reader in state.raw_readers)


_POLICIES: dict[str, type[Policy]] = {
    cls.name: cls for cls in (StaticPolicy, DynamicPolicy, DualPolicy, AbsorbedPolicy)
}


def make_policy(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in _POLICIES:
        known = ", ".join(sorted(_POLICIES))
        raise ConfigError(f"policy {name!r}", "is not known", f"choose one of: {known}")
    return _POLICIES[name]()
