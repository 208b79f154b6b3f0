from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from branchline.core.errors import ConfigError, KernelUnavailableError
from branchline.core.oracle import ActivationSemantics
from branchline.core.platform import Platform
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from branchline.core.route import Route
from branchline.core.selection import ACCEPTED, Rejection, Verdict
from branchline.fusion.producers.base import Producer, check_rank
from branchline.fusion.registry import ProducerRegistry
from branchline.fusion.site import Site, SiteFacts
from branchline.linear.branching import RowLayout
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.quantized_weight import QuantizedWeight
from branchline.linear.registry import Holder, Holding, LayerRegistry, SharedInput
from branchline.linear.routed import RoutedLinear
from branchline.policies.planner import Planner
from branchline.policies.policy import Policy, RouteChoice, make_policy

K = 8
CPU = Platform("cpu", None, "2.13", None, None)
SILU = ActivationSemantics("silu", gated=True)


class Fake(Producer):
    def __init__(self, name: str, reason: str = "", emulated: bool = False) -> None:
        self.name, self.reason, self.emulated = name, reason, emulated

    def supports(self, request) -> Verdict:
        return Verdict(not self.reason, self.reason)

    def accepts(self, semantics, inputs, emission) -> Verdict:
        return ACCEPTED

    def produce(self, semantics, inputs, emission):
        raise AssertionError("a plan runs nothing")


class UpTo64(Fake):
    def supports(self, request) -> Verdict:
        return check_rank(request)


def kernel(key=FP8_STATIC_TENSOR, scale: float = 0.5):
    if key is None:
        return FloatLinear(nn.Linear(K, K))
    found = InputScale.checked(scale, "x") if key.static else None
    weight = QuantizedWeight.from_float(torch.eye(K), "x")
    return EmulatedLinear(weight, None, InputContract(key, found))


class World:
    """Two sites: "mlp.act" feeds down; "norm" feeds q and k."""

    def __init__(self, policy: str = "dynamic", *, slots: bool = True, **changes) -> None:
        self.registry = LayerRegistry()
        for index, name in enumerate(("down", "q", "k")):
            self.registry.add(
                RoutedLinear(
                    name, index, kernel(), self.registry, torch.bfloat16, torch.device("cpu")
                )
            )
        act = self.site(0, "mlp.act", ("down",), **changes)
        self.sites = (act, self.site(1, "norm", ("q", "k"), **changes))
        self.producers = ProducerRegistry()
        self.fast = Fake("fast")
        self.producers.register("silu_mul", FP8_STATIC_TENSOR, Route.FUSED, Fake("gpu", "no GPU"))
        self.producers.register("silu_mul", FP8_STATIC_TENSOR, Route.FUSED, self.fast)
        self.raw = Fake("raw")
        self.producers.register("silu_mul", FP8_STATIC_TENSOR, Route.DUAL, self.raw)
        self.small = UpTo64("small")
        self.producers.register("silu_mul", FP8_STATIC_TENSOR, Route.ABSORBED, self.small)
        self.planner = self.planner_of(policy, slots=slots)

    def site(self, index: int, name: str, consumers: tuple[str, ...], **changes) -> Site:
        facts = SiteFacts(name, "activation", SILU, "", K, torch.bfloat16, consumers)
        facts = dataclasses.replace(facts, **changes)
        layers = tuple(self.registry.layers[n] for n in consumers)
        site = Site(facts, index, self.registry, layers, None, {})
        self.registry.share_input(SharedInput(consumers, site.other_readers))
        return site

    def planner_of(self, policy: str = "dynamic", *, slots=True, force=None) -> Planner:
        return Planner(
            self.registry,
            self.sites,
            self.producers,
            CPU,
            make_policy(policy),
            adapters_possible=slots,
            lora_dtype=torch.bfloat16,
            force=force,
        )

    def load(self, key: int, name: str, *layers: str, rank: int | None = None) -> None:
        holding = Holding(name, dict.fromkeys(layers, Holder(shrink_rank=rank)))
        self.registry.set_holdings({key: holding}, (), f"adapter '{name}' was loaded")


# --- decisions ---------------------------------------------------------------------------------


def test_all_fused_without_readers():
    plan = World().planner.plan({})
    assert plan.routes == (Route.FUSED, Route.FUSED)
    assert plan.branched == (False, False, False)
    assert plan.adapters == ()
    assert plan.count(Route.FUSED) == 2
    for site in plan.sites:
        assert site.producer == "fast"
        assert site.rejected == (Rejection("gpu", "no GPU"),)
        assert site.key == FP8_STATIC_TENSOR
        assert site.raw_readers == site.blame == ()
        assert site.reason


def test_one_raw_reader_decides_for_the_whole_site_and_is_blamed():
    world = World()
    world.load(7, "sql", "k")
    world.load(8, "chat", "down")
    plan = world.planner.plan({7: "sql"})
    assert plan.routes == (Route.FUSED, Route.UNFUSED)
    assert plan.producers == (world.fast, None)
    assert plan.branched == (False, False, True)
    norm = plan.sites[1]
    assert "sql" in norm.reason
    assert "on k" in norm.reason
    assert norm.blame == ("sql",)
    assert norm.raw_readers == ("adapter 'sql' on k",)
    assert (norm.producer, norm.emulated, norm.rejected) == ("", False, ())
    assert world.planner.plan({8: "chat"}).routes == (Route.UNFUSED, Route.FUSED)
    both = world.planner.plan({7: "sql", 8: "chat"})
    assert both.routes == (Route.UNFUSED, Route.UNFUSED)
    assert both.adapters == ("chat", "sql")
    assert world.planner.plan({}).routes == (Route.FUSED, Route.FUSED)


def test_dual_serves_both_where_only_adapters_read():
    world = World("dual")
    world.load(7, "sql", "k")
    plan = world.planner.plan({7: "sql"})
    assert plan.routes == (Route.FUSED, Route.DUAL)
    assert plan.producers == (world.fast, world.raw)
    assert "raw rows for adapter 'sql' on k" in plan.sites[1].reason
    with world.registry.layers["q"].register_forward_pre_hook(log_inputs):
        hooked = world.planner.plan({7: "sql"}).sites[1]
    assert hooked.route is Route.UNFUSED
    assert "log_inputs" in hooked.reason


def test_absorbed_serves_lora_up_to_rank_64():
    world = World("absorbed")
    world.load(7, "sql", "k", rank=16)
    world.load(8, "big", "q", rank=65)
    world.load(9, "other", "q")
    plan = world.planner.plan({7: "sql"})
    assert plan.routes == (Route.FUSED, Route.ABSORBED)
    assert plan.producers == (world.fast, world.small)
    assert plan.shrink_ranks == (0, 0, 16)
    big = world.planner.plan({7: "sql", 8: "big"})
    assert big.routes[1] is Route.DUAL
    assert big.producers[1] is world.raw
    assert big.shrink_ranks == (0, 65, 16)
    assert big.sites[1].rejected == (
        Rejection("small", "ranks up to 64 are absorbed, the highest live rank is 65"),
    )
    assert "not absorbed" in big.sites[1].reason
    other = world.planner.plan({7: "sql", 9: "other"}).sites[1]
    assert other.route is Route.DUAL
    assert "no LoRA shrink: adapter 'other' on q" in other.reason


def test_a_route_is_not_emulated_where_the_site_could_be_served_truly():
    world = World("absorbed")
    world.small.emulated = True
    world.load(7, "sql", "k", rank=16)
    site = world.planner.plan({7: "sql"}).sites[1]
    assert (site.route, site.producer) == (Route.DUAL, "raw")
    assert "only emulated" in site.reason
    world.fast.emulated = True
    assert world.planner_of("absorbed").plan({7: "sql"}).routes[1] is Route.ABSORBED


def test_what_nobody_serves_is_unfused_with_all_reasons():
    world = World("absorbed")
    world.raw.reason = "no raw here"
    world.load(8, "big", "q", rank=65)
    site = world.planner.plan({8: "big"}).sites[1]
    assert site.route is Route.UNFUSED
    assert [r.name for r in site.rejected] == ["small", "raw"]
    for part in ("read raw by adapter 'big'", "not absorbed", "not dual"):
        assert part in site.reason


def test_static_fuses_only_what_can_never_carry_an_adapter():
    plan = World("static").planner.plan({})
    assert plan.routes == (Route.UNFUSED, Route.UNFUSED)
    assert all("static" in site.reason for site in plan.sites)
    assert World("static", slots=False).planner.plan({}).routes == (Route.FUSED, Route.FUSED)
    world = World("static")
    world.registry.layers["down"].row_layout = RowLayout.UNKNOWN
    world.registry.layers["q"].row_layout = RowLayout.UNKNOWN
    assert world.planner.plan({}).routes == (Route.FUSED, Route.UNFUSED)


def test_another_policy_can_be_asked_without_disturbing_the_own():
    world = World()
    own = world.planner.plan({})
    other = world.planner.plan({}, make_policy("static"))
    assert (own.policy, other.policy) == ("dynamic", "static")
    assert own.routes != other.routes
    assert world.planner.plan({}) is own


# --- caching -----------------------------------------------------------------------------------


def test_plans_are_made_once_for_an_epoch_and_a_set():
    world = World()
    world.load(7, "sql", "k")
    world.load(8, "chat", "k")
    assert world.planner.plan({7: "sql"}) is world.planner.plan({7: "sql"})
    assert world.planner.plan({7: "sql", 8: "chat"}) is world.planner.plan({8: "chat", 7: "sql"})
    assert world.planner.plan({7: "sql"}) is not world.planner.plan({8: "chat"})


def test_a_new_epoch_makes_new_plans():
    world = World()
    before = world.planner.plan({})
    world.registry.advance("something changed")
    after = world.planner.plan({})
    assert after is not before
    assert after.epoch == before.epoch + 1 == world.registry.epoch
    assert after.routes == before.routes


def test_loading_and_unloading_are_followed():
    world = World()
    assert world.planner.plan({7: "sql"}).routes[1] is Route.FUSED
    world.load(7, "sql", "q")
    assert world.planner.plan({7: "sql"}).routes[1] is Route.UNFUSED
    world.registry.set_holdings({}, {7}, "unloaded")
    assert world.planner.plan({7: "sql"}).routes[1] is Route.FUSED


def test_a_plan_is_frozen_all_through():
    plan = World().planner.plan({})
    for target, name in ((plan, "routes"), (plan.sites[0], "route")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, None)
    for name in ("adapters", "sites", "routes", "producers", "branched"):
        assert isinstance(getattr(plan, name), tuple)


# --- hooks -------------------------------------------------------------------------------------


def log_inputs(*_) -> None:
    """A foreign hook."""


def test_hooks_on_layers_are_followed():
    world = World()
    assert world.planner.plan({}).routes == (Route.FUSED, Route.FUSED)
    with world.registry.layers["q"].register_forward_pre_hook(log_inputs):
        plan = world.planner.plan({})
        assert plan.routes == (Route.FUSED, Route.UNFUSED)
        assert "log_inputs" in plan.sites[1].reason
        assert "q" in plan.sites[1].reason
        assert plan.sites[1].blame == ()
    assert world.planner.plan({}).routes == (Route.FUSED, Route.FUSED)


def test_global_hooks_are_seen_though_no_epoch_advances():
    world = World()
    fused = world.planner.plan({})
    epoch = world.registry.epoch
    with nn.modules.module.register_module_forward_hook(log_inputs):
        plan = world.planner.plan({})
        assert plan.routes == (Route.UNFUSED, Route.UNFUSED)
        assert "log_inputs" in plan.sites[0].reason
    assert world.registry.epoch == epoch
    assert world.planner.plan({}) is fused


def test_one_global_hook_in_the_place_of_another_is_named():
    def second(*_):
        pass

    world = World()
    with nn.modules.module.register_module_forward_hook(log_inputs):
        world.planner.plan({})
    with nn.modules.module.register_module_forward_hook(second):
        assert "second" in world.planner.plan({}).sites[0].reason


# --- obstacles ---------------------------------------------------------------------------------


def test_consumers_with_different_scales_are_unfused_with_both_scales_named():
    world = World()
    world.registry.layers["k"].kernel = kernel(scale=0.25)
    world.registry.advance("re-quantised")
    site = world.planner.plan({}).sites[1]
    assert site.route is Route.UNFUSED
    for part in ("q", "k", "0.5", "0.25", "disagree"):
        assert part in site.reason


def test_consumers_with_different_keys_have_no_common_key():
    world = World()
    world.registry.layers["k"].kernel = kernel(FP8_DYNAMIC_TOKEN)
    world.registry.advance("re-quantised")
    site = world.planner.plan({}).sites[1]
    assert site.route is Route.UNFUSED
    assert str(FP8_DYNAMIC_TOKEN) in site.reason
    assert str(FP8_STATIC_TENSOR) in site.reason
    assert site.key is None


def test_a_re_quantised_layer_is_planned_anew():
    world = World()
    assert world.planner.plan({}).routes[1] is Route.FUSED
    world.registry.layers["k"].kernel = kernel(scale=0.25)
    assert world.planner.plan({}).routes[1] is Route.UNFUSED


def test_an_unquantised_consumer_is_named():
    world = World()
    world.registry.layers["k"].kernel = kernel(None)
    world.registry.advance("changed")
    site = world.planner.plan({}).sites[1]
    assert site.route is Route.UNFUSED
    assert "k (kernel float)" in site.reason


def test_a_key_without_producers():
    world = World()
    for layer in world.registry:
        layer.kernel = kernel(FP8_DYNAMIC_TOKEN)
    world.registry.advance("changed")
    site = world.planner.plan({}).sites[0]
    assert site.route is Route.UNFUSED
    assert str(FP8_DYNAMIC_TOKEN) in site.reason


def test_unknown_semantics_and_other_readers_are_reasons():
    unknown = World(semantics=None, reason="equals none of them").planner.plan({}).sites[0]
    assert (unknown.route, unknown.reason) == (Route.UNFUSED, "equals none of them")
    read = World(other_readers=("torch.Tensor.view in mlp",)).planner.plan({}).sites[0]
    assert read.route is Route.UNFUSED
    assert "torch.Tensor.view in mlp" in read.reason


def test_every_unfused_site_has_a_reason():
    world = World("static")
    world.load(1, "sql", "q")
    for policy in ("static", "dynamic"):
        for live in ({}, {1: "sql"}):
            plan = world.planner.plan(live, make_policy(policy))
            assert all(site.reason for site in plan.sites)
            for site, route, producer in zip(plan.sites, plan.routes, plan.producers, strict=True):
                assert site.route is route
                assert (producer is None) == (route is Route.UNFUSED)


# --- forcing -----------------------------------------------------------------------------------


def test_a_forced_producer_that_cannot_run_raises():
    world = World()
    with pytest.raises(KernelUnavailableError, match="no GPU"):
        world.planner_of(force="gpu").plan({})
    with pytest.raises(KernelUnavailableError, match="tritn"):
        world.planner_of(force="tritn").plan({})
    assert world.planner_of(force="fast").plan({}).producers == (world.fast, world.fast)


def test_a_refused_plan_is_not_kept():
    world = World()
    planner = world.planner_of(force="gpu")
    for _ in range(2):
        with pytest.raises(KernelUnavailableError):
            planner.plan({})


def test_emulation_is_shown():
    world = World()
    world.producers = ProducerRegistry()
    slow = Fake("eager", emulated=True)
    world.producers.register("silu_mul", FP8_STATIC_TENSOR, Route.FUSED, slow)
    assert all(site.emulated for site in world.planner_of().plan({}).sites)


# --- policies of others --------------------------------------------------------------------------


class Foreign(Policy):
    """Answers what it is made with."""

    name = "foreign"

    def __init__(self, answer) -> None:
        self.answer = answer

    def choose(self, state):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ZeroDivisionError("by nothing"), "ZeroDivisionError: by nothing"),
        (None, "no tuple of choices"),
        ((), "no tuple of choices"),
        (iter([RouteChoice(Route.UNFUSED, "z")]), "no tuple of choices"),
        (("fused",), "no choice of a route"),
        ((RouteChoice(Route.UNFUSED, ""),), "no reason"),
    ],
)
def test_a_policy_that_answers_nonsense_is_named(answer, said):
    world = World()
    with pytest.raises(ConfigError, match=r"policy 'foreign' of ") as caught:
        world.planner.plan({}, Foreign(answer))
    assert said in str(caught.value)
