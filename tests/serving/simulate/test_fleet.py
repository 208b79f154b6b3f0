"""Clocks and fleets."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import pytest
from transformers import LlamaConfig

from branchline.core.errors import ConfigError
from branchline.policies.cost import cost_model_for
from branchline.policies.policy import make_policy
from branchline.serving.config import WrapConfig
from branchline.serving.hollow.audit import HollowModel
from branchline.serving.serve_config import EngineConfig
from branchline.serving.simulate.clock import AdapterKind, ModelClock
from branchline.serving.simulate.fleet import Routing, Simulation
from branchline.serving.simulate.replica import StepLoad
from branchline.serving.simulate.slots import SimulatedAdapter
from branchline.serving.simulate.trace import read_trace
from tests import models

POLICIES = ("static", "dynamic", "dual", "absorbed")
KINDS = (AdapterKind(("q_proj", "v_proj"), 16, 3.0), AdapterKind((), 64, 1.0))
BASE = StepLoad(64, 0, 10_000, frozenset(), 0)


@pytest.fixture(scope="module")
def hollow(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    costs = cost_model_for("h200")
    with ExitStack() as undo:
        yield HollowModel.of(folder, WrapConfig(), costs.device.platform, undo)


def clock(hollow: HollowModel, policy: str = "dynamic", kinds=KINDS) -> ModelClock:
    return ModelClock(hollow, cost_model_for("h200"), make_policy(policy), kinds)


def simulation(hollow, trace: str, adapters: int, **settings) -> Simulation:
    settings = {"slots": (4,), "config": EngineConfig(), **settings}
    clocks = {make_policy(name): clock(hollow, name) for name in POLICIES}
    return Simulation(read_trace(trace, adapters), KINDS, clocks, **settings)


def run(asked: Simulation):
    return asked.run(model="model", device="h200", measured=False, trace="trace")


# --- clocks --------------------------------------------------------------------------------------


def test_a_step_costs_at_least_its_weights(hollow):
    weights = sum(layer.kernel.weight_bytes for layer in hollow.planner.registry)
    seconds = clock(hollow).step(BASE)
    assert seconds > weights / cost_model_for("h200").device.bandwidth
    assert seconds == clock(hollow).base_step(BASE)


def test_more_of_anything_costs_more(hollow):
    timed = clock(hollow)
    some = StepLoad(64, 32, 10_000, frozenset({0}), 2)
    steps = [
        BASE,
        some,
        StepLoad(64, 64, 10_000, frozenset({0}), 2),
        StepLoad(64, 64, 10_000, frozenset({0, 1}), 2),
        StepLoad(64, 64, 10_000, frozenset({0, 1}), 8),
        StepLoad(64, 64, 90_000, frozenset({0, 1}), 8),
        StepLoad(512, 512, 90_000, frozenset({0, 1}), 8),
    ]
    seconds = [timed.step(step) for step in steps]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == len(seconds)
    assert timed.base_step(some) == timed.step(BASE)


def test_policies_differ_where_adapters_are(hollow):
    step = StepLoad(512, 128, 0, frozenset({0, 1}), 4)
    seconds = {name: clock(hollow, name).step(step) for name in POLICIES}
    assert seconds["absorbed"] < seconds["dual"] < seconds["dynamic"]
    assert seconds["dynamic"] == seconds["static"]
    base = {name: clock(hollow, name).step(BASE) for name in POLICIES}
    assert base["static"] > base["dynamic"] == base["dual"] == base["absorbed"]
    assert len({clock(hollow, name).base_step(step) for name in POLICIES}) == 1


def test_loading_follows_the_bytes(hollow):
    timed = clock(hollow)
    small, large = (SimulatedAdapter("a", k, 1, timed.nbytes(k)) for k in (0, 1))
    # q: 4096 to 4096, v: 4096 to 1024, of four layers.
    assert small.nbytes == 2 * 16 * 4 * (4096 + 4096 + 4096 + 1024)
    assert timed.load(large) > timed.load(small) > small.nbytes / 50e9


def test_a_cache_that_holds_no_request_is_refused(hollow):
    with pytest.raises(ConfigError, match="does not fit a KV cache of 32"):
        run(simulation(hollow, "uniform,requests=9", 4, blocks=2))


@pytest.mark.parametrize(
    "text", ["", ",:16", "all:16:inf", "q_proj:x", "q_proj:0", "q_proj:8:0", "q:1:1:1", ":8"]
)
def test_what_is_no_kind(text):
    with pytest.raises(ConfigError, match="--kind"):
        AdapterKind.parse(text)


def test_kinds_are_read():
    assert AdapterKind.parse("q_proj,v_proj:16:0.7") == AdapterKind(("q_proj", "v_proj"), 16, 0.7)
    assert AdapterKind.parse("all:8") == AdapterKind((), 8)
    assert AdapterKind.parse("q_proj") == AdapterKind(("q_proj",))


def test_a_kind_that_fits_nothing_is_refused(hollow):
    with pytest.raises(ConfigError, match="names no linear"):
        clock(hollow, kinds=(AdapterKind(("c_attn",)),))


# --- fleets --------------------------------------------------------------------------------------


def test_more_slots_hit_more_and_lose_less(hollow):
    asked = simulation(
        hollow, "zipf:1.0,requests=400,clients=16,prompt=30,output=10", 40, slots=(4, 16, 40)
    )
    report = run(asked)
    assert len(report.cases) == 12
    for policy in POLICIES:
        cases = [case for case in report.cases if case.policy == policy]
        rates = [case.hit_rate for case in cases]
        assert rates == sorted(rates)
        assert cases[-1].loads_per_request <= 40 / 400
        assert cases[0].stall_seconds_per_request > cases[-1].stall_seconds_per_request
        assert cases[-1].fleet_tokens_per_second > cases[0].fleet_tokens_per_second
        assert all(0 < case.share_lost < 1 for case in cases)
    # Which slots are taken is no matter of a policy.
    assert len({case.hit_rate for case in report.cases if case.slots == 16}) == 1


def test_without_adapters_nothing_is_lost(hollow):
    cases = {case.policy: case for case in run(simulation(hollow, "uniform,requests=64", 0)).cases}
    assert cases["dynamic"].share_lost == pytest.approx(0.0)
    assert cases["dynamic"].hit_rate == 1.0
    # What engines do today costs without any adapter.
    assert cases["static"].share_lost > 0.01


def test_affinity_hits_more_than_spreading(hollow):
    trace = "zipf:0.8,requests=3000,rate=400,prompt=30,output=10"
    rates = {}
    for routing in Routing:
        asked = simulation(hollow, trace, 100, replicas=10, routing=routing, sample=10)
        rates[routing] = run(asked).cases[0].hit_rate
    assert rates[Routing.AFFINITY] > rates[Routing.SPREAD] + 0.1


def test_a_sample_stands_for_the_fleet(hollow):
    trace = "zipf:0.5,requests=20000,rate=2000,prompt=20,output=8"
    whole = run(simulation(hollow, trace, 500, replicas=40, sample=40)).cases[0]
    some = run(simulation(hollow, trace, 500, replicas=40, sample=16)).cases[0]
    assert some.hit_rate == pytest.approx(whole.hit_rate, abs=0.05)
    assert some.fleet_tokens_per_second == pytest.approx(whole.fleet_tokens_per_second, rel=0.1)


def test_thousands_of_adapters_and_replicas_take_seconds(hollow):
    begun = time.perf_counter()
    asked = simulation(hollow, "zipf:1.0,requests=300000,rate=3000", 10_000, replicas=1000)
    report = run(asked)
    assert time.perf_counter() - begun < 30
    assert (report.replicas, report.simulated, report.adapters) == (1000, 16, 10_000)


def test_fewer_clients_than_replicas_are_refused(hollow):
    with pytest.raises(ConfigError, match="leaves some of 100 replicas"):
        run(simulation(hollow, "uniform,requests=500", 10, replicas=100))


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_json(tmp_path):
    from typer.testing import CliRunner

    from branchline.cli import app

    models.build("llama").save_pretrained(tmp_path)
    command = [
        "simulate", "--model", str(tmp_path), "--adapters", "20", "--device", "l40s",
        "--trace", "zipf:1.0,requests=50,clients=4,prompt=10,output=5", "--slots", "4",
        "--kind", "q_proj:8:1", "--kind", "all:4:1",
    ]  # fmt: skip
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert "absorbed" in done.stdout
    assert "l40s" in done.stdout
    report = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [case["policy"] for case in report["cases"]] == list(POLICIES)
    refused = CliRunner().invoke(app, [*command, "--routing", "random"])
    assert refused.exit_code == 2
