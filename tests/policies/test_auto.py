"""Policy `auto`: the cheapest allowed route, by class of batches, with its numbers."""

from __future__ import annotations

import logging

import pytest
import torch

from branchline.core.fingerprint import fingerprint_of
from branchline.core.platform import detect_platform
from branchline.core.quant_key import FP8_STATIC_TENSOR
from branchline.core.route import Route
from branchline.fusion.traffic import SiteTraffic
from branchline.linear.batch_class import BatchClass
from branchline.linear.registry import RawReader
from branchline.policies import auto
from branchline.policies.auto import AutoPolicy, CheapestPolicy, UncalibratedPolicy
from branchline.policies.base import SiteState
from branchline.policies.cost import (
    CostModel,
    DeviceCosts,
    RouteCost,
    calibration_file,
    cost_model_for,
)
from branchline.policies.testkit_model import SmallModel, write_adapter

LORA = RawReader("branch", "sql", "down", shrink_rank=16)
DORA = RawReader("branch", "dora", "down")
HOOK = RawReader("hook", "log", "down")
#: Microseconds of a call, nanoseconds of an element: which is cheapest turns with the batch.
COSTS = {
    Route.UNFUSED: (30.0, 0.1),
    Route.FUSED: (10.0, 0.4),
    Route.DUAL: (16.0, 0.3),
    Route.ABSORBED: (10.0, 0.5),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    auto._warn_once.cache_clear()


def route_costs() -> tuple[RouteCost, ...]:
    return tuple(
        RouteCost(
            kind=kind, key=str(FP8_STATIC_TENSOR), route=str(route),
            call=call * 1e-6, element=element * 1e-9,
        )
        for kind in ("activation", "norm")
        for route, (call, element) in COSTS.items()
    )  # fmt: skip


def policy() -> CheapestPolicy:
    return CheapestPolicy(CostModel(cost_model_for("cpu").device, routes=route_costs()))


def state(tokens: int, *readers: RawReader, columns: int = 1000) -> SiteState:
    batch = BatchClass.of(tokens, tokens if readers else 0)
    traffic = SiteTraffic(
        batch.tokens, columns, torch.bfloat16, FP8_STATIC_TENSOR, batch.adapter_tokens,
        16 if readers else 0,
    )  # fmt: skip
    return SiteState(
        readers, True, "activation", columns, torch.bfloat16, FP8_STATIC_TENSOR, batch, traffic
    )


def routes(tokens: int, *readers: RawReader) -> list[Route]:
    return [choice.route for choice in policy().choose(state(tokens, *readers))]


def test_the_cheapest_route_turns_with_the_batch():
    assert routes(1) == [Route.FUSED, Route.UNFUSED]
    assert routes(4096) == [Route.UNFUSED, Route.FUSED]
    assert routes(1, LORA) == [Route.ABSORBED, Route.DUAL, Route.UNFUSED]
    assert routes(64, LORA)[0] is Route.DUAL
    assert routes(4096, LORA)[0] is Route.UNFUSED


def test_only_allowed_routes_are_compared():
    assert routes(1, LORA, DORA) == [Route.DUAL, Route.UNFUSED]
    assert routes(1, LORA, HOOK) == [Route.UNFUSED]
    assert "log" in policy().choose(state(1, HOOK))[0].reason


def test_choices_tell_their_numbers():
    choice = policy().choose(state(16, LORA))[0]
    assert choice.reason == (
        "absorbed: 18 us; dual 20.8 us, unfused 31.6 us at 16 tokens, 8/8 of them with adapters"
    )
    assert policy().choose(state(1))[0].reason == "fused: 10.4 us; unfused 30.1 us at 1 token"


def test_equal_costs_prefer_less_traffic():
    even = tuple(cost.model_copy(update={"call": 1e-6, "element": 0.0}) for cost in route_costs())
    chosen = CheapestPolicy(CostModel(cost_model_for("cpu").device, routes=even))
    assert chosen.choose(state(8))[0].route is Route.FUSED
    assert chosen.choose(state(8, LORA))[0].route is Route.ABSORBED


# --- where the costs come from -----------------------------------------------------------------


def calibration(**changes) -> DeviceCosts:
    here = fingerprint_of(detect_platform()).model_copy(update=changes)
    return DeviceCosts(
        device_type="cpu", fingerprint=here, bandwidth=2e10, launch_seconds=1e-5,
        routes=route_costs(), median_error=0.1, seconds=1.0,
    )  # fmt: skip


def test_without_a_calibration_it_is_dynamic_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            bound = AutoPolicy().bound(detect_platform())
    assert [r.getMessage() for r in caplog.records] == [
        "policy auto chooses as dynamic: no calibration of this device, run branchline calibrate"
    ]
    assert isinstance(bound, UncalibratedPolicy)
    assert not bound.by_batch
    (choice,) = bound.choose(SiteState((LORA,), True))
    assert choice.route is Route.UNFUSED
    assert "sql" in choice.reason
    assert "no calibration of this device" in choice.reason


def test_a_stale_calibration_is_told_and_not_used(caplog):
    calibration(threads=99).save(calibration_file("cpu"))
    with caplog.at_level(logging.WARNING):
        bound = AutoPolicy().bound(detect_platform())
    (choice,) = bound.choose(SiteState((), True))
    assert choice.route is Route.FUSED
    for told in (choice.reason, caplog.text):
        assert "threads was 99 and is" in told


def test_a_calibration_is_found_in_the_cache_or_by_its_file(tmp_path):
    calibration().save(tmp_path / "mine.json")
    found = AutoPolicy(calibration=str(tmp_path / "mine.json")).bound(detect_platform())
    assert isinstance(found, CheapestPolicy)
    assert found.costs.routes == route_costs()
    calibration().save(calibration_file("cpu"))
    assert AutoPolicy().bound(detect_platform()) == found


# --- in a model --------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path) -> SmallModel:
    calibration().save(calibration_file("cpu"))
    made = SmallModel(AutoPolicy(), "fp8-static", 0)
    made.adapters.load("a", write_adapter(tmp_path / "a", {"q": 4, "down": 8}, 1, {}))
    return made


def plan_of(model: SmallModel, names, tokens=None):
    with model.adapters.rows(names, tokens=tokens) as batch:
        return batch.plan


def test_plans_are_made_by_class_of_batches(model):
    small = plan_of(model, ["a", None], [1, 1])
    large = plan_of(model, ["a", None], [3000, 3000])
    assert set(small.routes) == {Route.ABSORBED}
    assert large.routes == (Route.UNFUSED, Route.UNFUSED)
    assert (small.batch, large.batch) == (BatchClass(2, 4, True), BatchClass(8192, 4, True))
    assert "at 2 tokens, 4/8 of them with adapters" in small.sites[1].reason
    assert plan_of(model, ["a", None], [2999, 3001]) is large
    assert plan_of(model, ["a", None], [1, 1]) is small


def test_rows_that_are_not_packed_count_one_token_each(model):
    plan = plan_of(model, ["a", None, None])
    assert plan.batch == BatchClass(4, 3, False)
    assert "counting one a row" in plan.sites[0].reason
    assert model.adapters.base_batch().plan.batch == BatchClass(1, 0, False)


def test_base_rows_may_be_unfused_where_fusion_loses(model):
    assert set(plan_of(model, [None], [4]).routes) == {Route.FUSED}
    assert set(plan_of(model, [None], [8192]).routes) == {Route.UNFUSED}


def test_mixtures_take_the_routes_of_dynamic(model):
    mixed = plan_of(model, [{"a": 0.5}, None], [1, 1])
    assert set(mixed.routes) == {Route.UNFUSED}


def test_other_policies_have_one_plan_for_all_classes(tmp_path):
    from branchline.policies.policy import make_policy

    model = SmallModel(make_policy("absorbed"), "fp8-static", 0)
    assert plan_of(model, [None], [1]) is plan_of(model, [None], [4096])
    assert plan_of(model, [None], [1]).batch is None


# --- classes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "adapted", "expected"),
    [
        (0, 0, (1, 0)),
        (1, 1, (1, 8)),
        (2, 1, (2, 4)),
        (3, 0, (4, 0)),
        (64, 1, (64, 1)),
        (65, 65, (128, 8)),
        (4096, 2049, (4096, 5)),
    ],
)
def test_classes_round_up(tokens, adapted, expected):
    found = BatchClass.of(tokens, adapted)
    assert (found.tokens, found.eighths) == expected
    assert found.tokens >= tokens
    assert found.adapter_tokens >= adapted
