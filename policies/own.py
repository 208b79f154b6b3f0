"""The policies that need no measurements: dynamic, static, dual, absorbed."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.route import Route
from .base import PLAIN_ROUTES, Policy, RouteChoice, SiteState, allowed_routes


@dataclass(frozen=True)
class DynamicPolicy(Policy):
    """Fused unless a raw consumer is live for this batch."""

    name = "dynamic"
    routes = PLAIN_ROUTES

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        changers = [reader for reader in state.raw_readers if reader.changes_input]
        if changers:
            names = ", ".join(str(reader) for reader in changers)
            return (RouteChoice(Route.UNFUSED, f"changed before the linears by {names}"),)
        if state.raw_readers:
            return (RouteChoice(Route.UNFUSED, f"read raw by {named_readers(state)}"),)
        return (RouteChoice(Route.FUSED, "no raw reader is live"),)


@dataclass(frozen=True)
class StaticPolicy(Policy):
    """A layer that may ever carry an adapter is never fused: what engines do today."""

    name = "static"
    routes = PLAIN_ROUTES

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        if state.may_carry_adapters:
            return (RouteChoice(Route.UNFUSED, "a consumer may carry an adapter (policy static)"),)
        return DynamicPolicy().choose(state)


@dataclass(frozen=True)
class DualPolicy(Policy):
    """Where adapters are live, codes and, for their rows alone, the raw activation beside."""

    name = "dual"
    routes = PLAIN_ROUTES | {Route.DUAL}

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        (unfused_or_fused,) = DynamicPolicy().choose(state)
        if Route.DUAL not in allowed_routes(state.raw_readers):
            return (unfused_or_fused,)
        return (RouteChoice(Route.DUAL, f"raw rows for {named_readers(state)}"), unfused_or_fused)


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
        return (RouteChoice(Route.ABSORBED, f"absorbs {named_readers(state)}"), *dual)


def named_readers(state: SiteState) -> str:
    """Who reads raw, as reasons name them."""
    return ", ".join(str(reader) for reader in state.raw_readers)
