"""The self-check: equal routes pass, faults are named and go out of service, all else stays."""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import IA3Config, get_peft_model

import branchline
from branchline.core.errors import AdapterNotFoundError, ConfigError, ContractError
from branchline.core.route import Route
from branchline.fusion.producers.kernel import NativeProducer
from branchline.policies import make_policy
from branchline.policies.plan import OutOfService
from branchline.serving.self_check import check_numerics
from tests.helpers import same_bytes
from tests.models import save_adapter, token_ids

NORM = "model.layers.0.input_layernorm"
BATCH = ["attn", "mlp", None]
QUANTS = ["fp8-static", "fp8-dynamic", "fp8-block", "mxfp8"]


def logits(served, names=BATCH) -> torch.Tensor:
    with served.adapters.rows(names):
        return served(token_ids(len(names), 7)).logits


def unfused(served) -> torch.Tensor:
    """Of a policy that fuses nothing where adapters may come."""
    planner, chosen = served.planner, served.planner.policy
    planner.policy = make_policy("static")
    served.registry.advance("the policy changed")
    try:
        assert set(planner.plan({}).routes) == {Route.UNFUSED}
        return logits(served)
    finally:
        planner.policy = chosen
        served.registry.advance("the policy changed back")


def route_of(served, names, site=NORM):
    plan = served.planner.plan(served.adapters.live(names))
    return next(planned for planned in plan.sites if planned.site == site)


@pytest.fixture(scope="module")
def untouched(make_family):
    """A served model that tests leave as it is."""
    return make_family("llama").served(policy="dual")


@pytest.fixture
def spoil(monkeypatch):
    """Let the C producers do something wrong at one site, on some route."""

    def install(wrong, *, site=NORM, route=None) -> None:
        right = NativeProducer.produce

        def produce(self, semantics, inputs, emission):
            made = right(self, semantics, inputs, emission)
            if emission.site == site and route in (None, emission.route):
                wrong(made.activation)
            return made

        monkeypatch.setattr(NativeProducer, "produce", produce)

    return install


def flip_code(activation) -> None:
    codes = activation.codes.view(torch.uint8).view(-1, activation.shape[-1])
    codes[1, 3] ^= 1


def double_scale(activation) -> None:
    activation.scale.mul_(2)


def wrong_raw_row(activation) -> None:
    activation.raw.values.view(-1, activation.shape[-1])[0].add_(1)


def wrong_product(activation) -> None:
    for rows in activation.shrunk.values():
        rows[1, 0] += 0.5


def fail(activation) -> None:
    raise ContractError("a producer", "is broken", "mend it")


# --- nothing differs ---------------------------------------------------------------------------


def test_routes_of_every_family_agree(family):
    served = family.served(quant=QUANTS[0])
    quantised = [layer.name for layer in served.registry if layer.kernel.contract.key is not None]
    for quant, policy in itertools.product(QUANTS, ("dynamic", "dual", "absorbed")):
        if quant != QUANTS[0] and policy == "dynamic":
            for name in quantised:
                served.requantize(name, quant)
        served.planner.policy = make_policy(policy)
        report = check_numerics(served)
        assert report.ok, report.differences
        assert (report.out_of_service, report.unchecked) == ((), ())
        assert (report.policy, report.adapters) == (policy, ("all", "attn", "mlp"))
        fused = [s for s in served.planner.plan({}).sites if s.route == Route.FUSED]
        assert report.sites == len(fused) > 0
        assert (report.routes == report.sites) == (policy == "dynamic")
        assert report.values > 0
        assert set(report.saturated) == {"activation", "norm"}
        assert all(0 <= share < 0.5 for share in report.saturated.values())


def test_what_an_adapter_does_to_outputs_alone_is_compared_on_the_fused_route(llama, tmp_path):
    targets = {"target_modules": ["k_proj"], "feedforward_modules": []}
    model = get_peft_model(llama.plain(), IA3Config(**targets, init_ia3_weights=False))
    model.save_pretrained(tmp_path)
    served = llama.wrap()
    served.adapters.load("gain", tmp_path)
    assert route_of(served, ["gain"]).route == Route.FUSED
    report = check_numerics(served, adapters=["gain"])
    assert report.ok
    assert report.sites == 2
    assert report.routes == 4


def test_with_policy_static_there_is_nothing_to_compare(untouched):
    planner = untouched.planner
    planner.policy = make_policy("static")
    try:
        report = check_numerics(untouched)
    finally:
        planner.policy = make_policy("dual")
    assert (report.ok, report.sites, report.routes) == (True, 0, 0)


def test_the_eager_definition_is_compared_as_well(llama):
    report = check_numerics(llama.served(torch.float32, policy="absorbed"))
    assert report.ok
    assert report.sites == 6


# --- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "what", "policy", "quant"),
    [
        (flip_code, "codes", "dynamic", "fp8-static"),
        (flip_code, "codes", "dual", "fp8-block"),
        (double_scale, "scale", "dynamic", "fp8-dynamic"),
        (wrong_raw_row, "raw rows", "dual", "fp8-static"),
        (wrong_product, "shrunk rows", "absorbed", "fp8-dynamic"),
        (fail, "error", "dynamic", "fp8-static"),
    ],
)
def test_a_fault_is_named_and_taken_out_of_service(
    llama, spoil, caplog, wrong, what, policy, quant
):
    route = {"raw rows": Route.DUAL, "shrunk rows": Route.ABSORBED}.get(what, Route.FUSED)
    names = [] if route == Route.FUSED else ["attn"]
    served = llama.served(quant=quant, policy=policy)
    assert check_numerics(served).ok
    spoil(wrong, route=route)
    epoch = served.registry.epoch
    with caplog.at_level(logging.ERROR, logger="branchline.self_check"):
        report = check_numerics(served)
    assert not report.ok
    assert {d.site for d in report.differences} == {NORM}
    found = [d for d in report.differences if d.what == what]
    assert found
    assert {(d.route, d.producer, d.kind) for d in found} == {(str(route), "native", "norm")}
    readers = ("q_proj", "v_proj") if route != Route.FUSED else ("q_proj", "k_proj", "v_proj")
    if what != "error":
        consumers = {d.consumer for d in found if "attn" in d.adapters or not names}
        assert consumers >= {f"model.layers.0.self_attn.{name}" for name in readers}
        assert all(0 < d.differing <= d.compared for d in found)
        assert all(d.got != d.wanted and d.first for d in found)
    # Out of service: in the report, in the planner, in the log, in the plan, in the audit.
    (entry,) = report.out_of_service
    assert (entry.site, entry.route, entry.producer) == (NORM, str(route), "native")
    (kept,) = served.planner.out_of_service
    assert isinstance(kept, OutOfService)
    assert kept.reason == entry.reason
    assert f"{route} by native at {NORM} is out of service" in caplog.text
    assert served.registry.epoch > epoch
    planned = route_of(served, names)
    assert planned.route == Route.UNFUSED
    assert "out of service" in planned.reason
    assert "out of service" in str(served.audit([names]))
    # Other sites go on as before, this one on its other routes.
    other = route_of(served, names, "model.layers.1.input_layernorm")
    assert other.route == route
    assert (route_of(served, []).route == Route.FUSED) == (route != Route.FUSED)
    assert same_bytes(logits(served), unfused(served))
    again = check_numerics(served)
    assert again.ok
    assert again.out_of_service == report.out_of_service
    assert again.sites in (report.sites, report.sites - 1)


def test_outputs_are_wrong_before_and_right_after_in_every_thread(llama, spoil):
    served = llama.served(policy="dual")
    right = unfused(served)
    spoil(flip_code)
    assert not same_bytes(logits(served), right)
    with ThreadPoolExecutor(2) as threads:
        report = threads.submit(check_numerics, served).result()
        assert same_bytes(threads.submit(logits, served).result(), right)
    assert same_bytes(logits(served), right)
    assert {(e.route, e.producer) for e in report.out_of_service} == {
        ("fused", "native"),
        ("dual", "native"),
    }
    beside = {d.adapters for d in report.differences}
    assert beside >= {(), ("attn",), ("all",)}
    assert ("mlp",) not in beside
    assert {d.packed for d in report.differences if d.adapters == ("attn",)} == {True}


def test_what_is_out_of_service_stays_so_when_adapters_come_and_go(llama, spoil):
    served = llama.wrap(policy="dual")
    served.adapters.load("attn", llama.folders["attn"])
    spoil(wrong_raw_row, route=Route.DUAL)
    check_numerics(served, adapters=["attn"])
    served.adapters.unload("attn")
    served.adapters.load("all", llama.folders["all"])
    assert route_of(served, ["all"]).route == Route.UNFUSED
    assert "out of service" in route_of(served, ["all"]).reason


# --- after a load ------------------------------------------------------------------------------


def test_after_a_load_only_what_the_adapter_adds_is_compared(llama):
    served = llama.wrap(policy="absorbed")
    served.adapters.load("mlp", llama.folders["mlp"])
    assert check_numerics(served).sites == 6
    served.adapters.load("attn", llama.folders["attn"])
    report = check_numerics(served, adapters=["attn"])
    assert report.ok
    # The norms before attention: alone, and together with the other.
    assert report.sites == 2
    assert report.routes == 4
    assert report.adapters == ("attn", "mlp")


def test_after_a_load_a_fault_of_other_sites_is_not_looked_for(llama, spoil):
    served = llama.served(policy="dual")
    spoil(flip_code, site="model.layers.0.post_attention_layernorm")
    assert check_numerics(served, adapters=["attn"]).ok
    assert not check_numerics(served, adapters=["mlp"]).ok
    assert check_numerics(served, adapters=[]).routes == 0


def test_an_idle_adapter_makes_room_and_one_in_use_does_not(llama):
    served = llama.wrap(policy="dual", max_loras=1)
    for name, folder in llama.folders.items():
        served.adapters.load(name, folder)
    assert served.adapters.info("attn").slot is not None
    assert check_numerics(served, adapters=["all"]).routes > 0
    assert served.adapters.info("all").slot is not None
    with served.adapters.rows(["attn", None]):
        report = check_numerics(served, adapters=["mlp"])
        assert report.ok
        assert report.routes == 0
        (left,) = report.unchecked
        assert left.adapters == ("mlp",)
        assert "batches in flight" in left.reason
        assert check_numerics(served, adapters=["attn"]).routes > 0
    assert check_numerics(served, adapters=["mlp"]).routes > 0


def test_what_cannot_be_checked_is_refused_by_name(llama):
    served = llama.served()
    with pytest.raises(AdapterNotFoundError, match="nobody"):
        check_numerics(served, adapters=["nobody"])
    with pytest.raises(ConfigError, match="one text"):
        check_numerics(served, adapters="attn")
    with pytest.raises(ConfigError, match="rows=0"):
        check_numerics(served, rows=0)
    served.unwrap()
    with pytest.raises(ConfigError, match="unwrapped"):
        check_numerics(served)


def test_registered_names_are_left_for_their_first_use(llama):
    served = llama.wrap(policy="dual")
    served.adapters.register("later", llama.folders["attn"])
    report = check_numerics(served)
    assert report.adapters == ()
    assert served.adapters.info("later").state == "registered"


# --- beside a server ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_counters_of_what_ran_stay_as_they_are(llama, dtype):
    served = llama.served(dtype, policy="absorbed")
    logits(served)

    def counters():
        slots = [layer.branch.product for layer in served.registry if layer.branch is not None]
        return (
            [(s.counters.routes(), s.counters.fallbacks()) for s in served.discovery.sites],
            [dict(slot.fallbacks) for slot in slots if slot is not None],
            [(i.name, i.hits, i.last_use, i.batches, i.slot) for i in served.adapters.list()],
            served.registry.epoch,
        )

    before = counters()
    assert check_numerics(served).routes > 0
    assert check_numerics(served, adapters=["attn"]).routes > 0
    assert counters() == before


def test_the_batch_of_the_caller_goes_on(untouched):
    right = logits(untouched)
    with untouched.adapters.rows(BATCH) as batch:
        assert check_numerics(untouched).ok
        assert untouched.registry.current_batch() is batch
        assert same_bytes(untouched(token_ids(3, 7)).logits, right)
    assert not any(info.batches for info in untouched.adapters.list())


def test_the_same_seed_makes_the_same_check(untouched):
    first, second, other = (check_numerics(untouched, seed=seed, rows=7) for seed in (1, 1, 2))
    assert first.model_copy(update={"seconds": 0.0}) == second.model_copy(update={"seconds": 0.0})
    assert other.values == first.values


def test_checks_run_beside_batches(llama):
    served = llama.served(policy="absorbed", max_loras=3)
    right = {name: logits(served, [name, None]) for name in llama.folders}
    wrong: list[str] = []
    stop = threading.Event()

    def serve(name: str) -> None:
        while not stop.is_set():
            if not same_bytes(logits(served, [name, None]), right[name]):
                wrong.append(name)

    threads = [threading.Thread(target=serve, args=(name,)) for name in ("attn", "mlp")]
    for thread in threads:
        thread.start()
    try:
        reports = [check_numerics(served) for _ in range(3)]
        reports += [check_numerics(served, adapters=["all"]) for _ in range(5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert all(report.ok for report in reports)
    assert all(report.routes for report in reports)


def test_an_adapter_of_a_broad_shape_is_compared_at_every_site(llama, tmp_path):
    folder = save_adapter(llama.plain(), tmp_path, "all-linear", rank=64, seed=5)
    served: branchline.ServedModel = llama.wrap(policy="absorbed", max_lora_rank=64)
    served.adapters.load("wide", folder)
    report = check_numerics(served, adapters=["wide"])
    assert report.ok
    assert report.sites == 6
