"""The kit passes our own policies, and finds what is wrong with bad ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from branchline.core.route import Route
from branchline.linear.registry import LayerRegistry
from branchline.policies import planner
from branchline.policies.auto import CheapestPolicy
from branchline.policies.base import Policy, RouteChoice, SiteState, allowed_routes
from branchline.policies.cost import cost_model_for
from branchline.policies.cost.routes import RouteCost
from branchline.policies.own import AbsorbedPolicy, DynamicPolicy
from branchline.policies.policy import make_policy, policy_names
from branchline.policies.testkit import PolicyFailedError, check_policy
from branchline.policies.testkit_model import SmallModel, write_adapter


def by_turns(first: Route) -> CheapestPolicy:
    """Costs by which `first` is cheapest for few rows and dearest for many."""
    costs = tuple(
        RouteCost(
            kind=kind,
            key="fp8-static-tensor",
            route=str(route),
            call=1e-6 if route == first else 1e-5,
            element=1e-7 if route == first else 1e-9,
        )
        for kind in ("activation", "norm")
        for route in Route
    )
    model = cost_model_for("cpu")
    return CheapestPolicy(type(model)(model.device, routes=costs))


@pytest.mark.parametrize("name", [*policy_names(), "auto:device=h200", "auto:device=cpu"])
def test_our_own_policies_pass(name):
    check_policy(make_policy(name))


@pytest.mark.parametrize("first", list(Route))
def test_auto_passes_whatever_the_costs_are(first):
    check_policy(by_turns(first), seeds=(0, 1))


class ModelPolicy(BaseModel, Policy):
    """A policy may be a pydantic model."""

    model_config = ConfigDict(frozen=True)
    name: ClassVar[str] = "model"
    least: int = 0

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        return AbsorbedPolicy().choose(state)


def test_a_policy_that_is_a_pydantic_model_passes():
    check_policy(ModelPolicy(least=3), seeds=(0,))


def test_the_small_model_takes_the_routes_that_policies_choose(tmp_path):
    folder = write_adapter(tmp_path / "a", {"q": 4, "down": 80}, 1, {})
    for policy, expected in (
        ("dynamic", (Route.UNFUSED, Route.UNFUSED)),
        ("dual", (Route.DUAL, Route.DUAL)),
        ("absorbed", (Route.ABSORBED, Route.DUAL)),
    ):
        model = SmallModel(make_policy(policy), "fp8-static", 0)
        model.adapters.load("a", folder)
        assert model.plan(["a"]).routes == expected
        assert model.plan([None]).routes == (Route.FUSED, Route.FUSED)


# --- bad ones ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlwaysFused(Policy):
    name: ClassVar[str] = "always-fused"

    def choose(self, state):
        return (RouteChoice(Route.FUSED, "fast"),)


@dataclass(frozen=True)
class DualForHooks(Policy):
    name: ClassVar[str] = "dual-for-hooks"

    def choose(self, state):
        route = Route.DUAL if state.raw_readers else Route.FUSED
        return (RouteChoice(route, "raw rows are enough"),)


@dataclass(frozen=True)
class Remembers(Policy):
    name: ClassVar[str] = "remembers"
    seen: list = field(default_factory=list, hash=False)

    def choose(self, state):
        self.seen.append(state)
        fused = len(self.seen) % 7 and not state.raw_readers
        return (RouteChoice(Route.FUSED if fused else Route.UNFUSED, "it was time"),)


@dataclass(frozen=True)
class NoReason(Policy):
    name: ClassVar[str] = "no-reason"

    def choose(self, state):
        route = min(allowed_routes(state.raw_readers))
        return (RouteChoice(route, ""),)


@dataclass(frozen=True)
class BeyondItsRoutes(Policy):
    name: ClassVar[str] = "beyond"
    routes = frozenset({Route.UNFUSED})

    def choose(self, state):
        return DynamicPolicy().choose(state)


@dataclass(frozen=True)
class NoChoice(Policy):
    name: ClassVar[str] = "no-choice"

    def choose(self, state):
        return ()


@dataclass
class NoValue(Policy):
    name: ClassVar[str] = "no-value"

    def choose(self, state):
        return DynamicPolicy().choose(state)


class Identity(Policy):
    name = "identity"

    def choose(self, state):
        return DynamicPolicy().choose(state)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (AlwaysFused(), "breaks I1: it chose fused for a site with"),
        (DualForHooks(), "breaks I1: it chose dual for a site with"),
        (Remembers(), "answers otherwise the second time"),
        (NoReason(), "no choice with a reason"),
        (BeyondItsRoutes(), "it chose fused, which its `routes` do not have"),
        (NoChoice(), "no tuple of choices"),
        (NoValue(), "it has no hash"),
        (Identity(), "two of the same options are not equal"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_bad_policies_fail(bad, message):
    with pytest.raises(PolicyFailedError) as caught:
        check_policy(bad)
    assert message in str(caught.value)
    assert bad.name in str(caught.value)


@pytest.mark.parametrize(
    ("break_it", "invariant"),
    [
        ("adds", "I6"),
        ("by neighbours", "I7"),
    ],
)
def test_wrong_bytes_are_found_in_the_model(monkeypatch, break_it, invariant):
    """What a policy cannot break by itself, a route that it alone chooses can."""
    run = SmallModel.run

    def broken(self, x):
        out = run(self, x)
        if break_it == "adds":
            return out if self.planner.policy.name == "unfused" else out + 1
        # The same for both models, so that only neighbours show it.
        return out + x.float().mean()

    monkeypatch.setattr(SmallModel, "run", broken)
    with pytest.raises(PolicyFailedError, match=f"breaks {invariant}"):
        check_policy(DynamicPolicy(), seeds=(0,))


def test_readers_that_are_missed_are_found(monkeypatch):
    monkeypatch.setattr(LayerRegistry, "raw_readers", lambda self, layer, live: ())
    with pytest.raises(PolicyFailedError, match="breaks I1: q reads the raw activation"):
        check_policy(DynamicPolicy(), seeds=(0,))


def test_readers_that_nobody_is_told_about_are_found(monkeypatch):
    made = planner._site_plan

    def blameless(*given):
        return dataclasses.replace(made(*given), blame=())

    monkeypatch.setattr(planner, "_site_plan", blameless)
    with pytest.raises(PolicyFailedError, match=r"breaks I2: .* is read by"):
        check_policy(DynamicPolicy(), seeds=(0,))
