"""What /metrics tells: requests by adapter, the engine by vLLM's names, adapters, routes."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from branchline.core.errors import AdapterNotFoundError, RequestFailedError
from branchline.core.route import Route
from branchline.policies.plan import OutOfService
from branchline.serving.engine.requests import EngineStats, FinishReason
from branchline.serving.http import metrics as metrics_module
from branchline.serving.http.collectors import listed
from branchline.serving.http.metrics import AdapterLabels, Metrics, Outcome, router
from branchline.serving.self_check import Readiness, check_numerics
from branchline.serving.serve_config import ServeConfig
from tests.models import token_ids


class FakeEngine:
    """An engine whose state a test sets."""

    def __init__(self) -> None:
        self.alive = True
        self.state = {
            "running": 0, "waiting": 0, "running_by_adapter": {}, "waiting_by_adapter": {},
            "blocks": 100, "used_blocks": 0, "steps": 0, "prompt_tokens": 0, "cached_tokens": 0,
            "generated_tokens": 0, "failed_requests": 0, "preemptions": 0,
        }  # fmt: skip

    def stats(self) -> EngineStats:
        return EngineStats(**self.state)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def served(make_family):
    return make_family("llama").served(max_loras=3, policy="dual")


@pytest.fixture
def metrics(served, engine) -> Metrics:
    return Metrics(ServeConfig(max_loras=3), served, engine, model_name="llama")


def samples(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Every sample by name and sorted labels, read by Prometheus' own parser."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics.exposition("")[0].decode()):
        for sample in family.samples:
            by_labels = found.setdefault(sample.name, {})
            key = tuple(sorted(sample.labels.items()))
            assert key not in by_labels, f"{sample.name}{dict(key)} is there twice"
            by_labels[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name][tuple(sorted(labels.items()))]


# --- requests -----------------------------------------------------------------------------------


def test_answers_are_counted_by_adapter_and_outcome(metrics):
    first = metrics.began("sql", 5)
    second = metrics.began(None, 7)
    first.first_token()
    first.ended(FinishReason.STOP, generated=3, cached=2)
    second.ended(Outcome.TIMEOUT, generated=0)
    told = samples(metrics)
    assert told["branchline_requests_total"] == {
        (("adapter", "sql"), ("outcome", "stop")): 1,
        (("adapter", "__base__"), ("outcome", "timeout")): 1,
    }
    for name, sql, base in (("prompt", 5, 7), ("cached_prompt", 2, 0), ("generated", 3, 0)):
        assert told[f"branchline_{name}_tokens_total"] == {
            (("adapter", "sql"),): sql,
            (("adapter", "__base__"),): base,
        }


def test_an_answer_is_counted_once_whoever_tells(metrics):
    meter = metrics.began("sql", 5)
    meter.ended(Outcome.TIMEOUT, generated=1)
    meter.ended(FinishReason.CANCELLED, generated=4)
    assert value(metrics, "branchline_generated_tokens_total", adapter="sql") == 1
    assert len(samples(metrics)["branchline_requests_total"]) == 1


def test_latencies_are_those_of_the_clock(metrics, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now[0])
    meter = metrics.began("sql", 5)
    now[0] += 0.5
    meter.started()
    other = metrics.began("sql", 5)
    now[0] += 0.25
    other.started(now[0] - 0.25)
    now[0] -= 0.25
    now[0] += 1.5
    meter.first_token()
    now[0] += 3.0
    meter.first_token()
    meter.ended(FinishReason.LENGTH, generated=4)
    for name, seconds in (
        ("queue", 0.5),
        ("time_to_first_token", 2.0),
        ("time_per_output_token", 1.0),
        ("request", 5.0),
    ):
        assert value(metrics, f"branchline_{name}_seconds_sum") == pytest.approx(seconds), name
        count = 2 if name == "queue" else 1
        assert value(metrics, f"branchline_{name}_seconds_count") == count, name
    assert value(metrics, "branchline_time_to_first_token_seconds_bucket", le="1.0") == 0
    assert value(metrics, "branchline_time_to_first_token_seconds_bucket", le="2.5") == 1


def test_one_token_has_no_time_between_tokens(metrics):
    meter = metrics.began(None, 1)
    meter.first_token()
    meter.ended(FinishReason.LENGTH, generated=1)
    assert value(metrics, "branchline_time_per_output_token_seconds_count") == 0


def test_refused_requests_are_counted_by_status(metrics):
    for status in (404, 404, 429):
        metrics.refused(status)
    assert value(metrics, "branchline_refused_requests_total", status="404") == 2
    assert value(metrics, "branchline_refused_requests_total", status="429") == 1


def test_names_of_adapters_are_escaped(metrics):
    name = 'a"b\\c<script>'
    metrics.began(name, 1).ended(FinishReason.STOP, generated=1)
    labels = {"adapter": name, "outcome": "stop"}
    assert value(metrics, "branchline_requests_total", **labels) == 1


def test_two_servers_in_one_process_do_not_mix(metrics, served, engine):
    other = Metrics(ServeConfig(), served, engine, model_name="other")
    metrics.began("sql", 5).ended(FinishReason.STOP, generated=1)
    assert "branchline_requests_total" not in samples(other)


# --- bounded labels -----------------------------------------------------------------------------


def test_series_are_bounded_whatever_names_come(metrics, monkeypatch):
    monkeypatch.setattr(metrics._labels, "_most", 4)
    for number in range(50):
        metrics.began(f"adapter-{number}", 1).ended(FinishReason.STOP, generated=1)
    told = samples(metrics)["branchline_requests_total"]
    assert {dict(key)["adapter"] for key in told} == {
        "adapter-0", "adapter-1", "adapter-2", "adapter-3", "other",
    }  # fmt: skip
    assert sum(told.values()) == 50


def test_an_idle_adapter_gives_its_series_to_one_in_use(metrics, monkeypatch):
    monkeypatch.setattr(metrics._labels, "_most", 2)
    now = [0.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    for name in ("a", "b"):
        metrics.began(name, 1).ended(FinishReason.STOP, generated=1)
        now[0] += 1
    now[0] = 600.0
    metrics.began("c", 1).ended(FinishReason.STOP, generated=1)
    told = samples(metrics)
    for name in ("requests", "prompt_tokens", "cached_prompt_tokens", "generated_tokens"):
        adapters = {dict(key)["adapter"] for key in told[f"branchline_{name}_total"]}
        assert adapters == {"b", "c"}, name


def test_a_series_with_a_running_answer_stays():
    labels = AdapterLabels(1, 10.0)
    assert labels.enter("a", 0.0) == ("a", None)
    assert labels.enter("b", 1000.0) == ("other", None)
    labels.leave("a", 1000.0)
    assert labels.enter("b", 1009.0) == ("other", None)
    assert labels.enter("a", 1009.5) == ("a", None)
    labels.leave("a", 1010.0)
    assert labels.enter("b", 1020.0) == ("b", "a")
    assert labels.enter(None, 1020.0) == ("__base__", None)
    assert labels.enter("other", 1020.0) == ("other", None)


# --- the engine ---------------------------------------------------------------------------------


def test_the_gateway_reads_which_adapters_run_and_wait(metrics, engine):
    before = time.time()
    engine.state.update(running_by_adapter={"b": 2, "a": 1}, waiting_by_adapter={"c": 1})
    (labels, changed_at), *more = samples(metrics)["vllm:lora_requests_info"].items()
    assert not more
    assert dict(labels) == {
        "max_lora": "3",
        "running_lora_adapters": "a,b",
        "waiting_lora_adapters": "c",
    }
    assert before <= changed_at <= time.time()


def test_only_the_current_adapters_exist_and_the_value_is_when_they_changed(
    metrics, engine, monkeypatch
):
    now = [5000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    told = []
    for running in ({"a": 1}, {"a": 3}, {}, {"b": 1}):
        now[0] += 100
        engine.state["running_by_adapter"] = running
        (found,) = samples(metrics)["vllm:lora_requests_info"].items()
        told.append((dict(found[0])["running_lora_adapters"], found[1]))
    assert told == [("a", 5100.0), ("a", 5100.0), ("", 5300.0), ("b", 5400.0)]


def test_a_comma_in_a_name_makes_no_second_name():
    assert listed(["b", "a,victim"]) == "a%2Cvictim,b"


def test_the_load_has_vllm_s_names(metrics, engine):
    engine.state.update(running=3, waiting=2, used_blocks=25)
    assert value(metrics, "vllm:num_requests_running", model_name="llama") == 3
    assert value(metrics, "vllm:num_requests_waiting", model_name="llama") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc", model_name="llama") == 0.25
    assert value(metrics, "vllm:gpu_cache_usage_perc", model_name="llama") == 0.25
    (info,) = samples(metrics)["vllm:cache_config_info"]
    assert dict(info)["block_size"] == "16"
    assert dict(info)["num_gpu_blocks"] == "100"


def test_counters_of_the_engine_are_its_own(metrics, engine):
    engine.state.update(
        steps=7, prompt_tokens=11, cached_tokens=5, generated_tokens=13, failed_requests=1,
        preemptions=2,
    )  # fmt: skip
    for name, expected in (
        ("steps", 7),
        ("prompt_tokens", 11),
        ("cached_tokens", 5),
        ("generated_tokens", 13),
        ("failed_requests", 1),
        ("preemptions", 2),
    ):
        assert value(metrics, f"branchline_engine_{name}_total") == expected
    assert value(metrics, "branchline_engine_alive") == 1
    engine.alive = False
    assert value(metrics, "branchline_engine_alive") == 0


def test_a_server_without_an_engine_has_metrics(served):
    told = samples(Metrics(ServeConfig(), served, None, model_name="encoder"))
    assert "branchline_engine_steps_total" not in told
    assert "branchline_adapter_slots" in told


# --- adapters and routes ------------------------------------------------------------------------


def test_adapters_and_their_memory_are_told(metrics, served, tmp_path):
    memory = served.adapters.memory()
    assert value(metrics, "branchline_adapter_slots") == memory.slots == 4
    assert value(metrics, "branchline_adapter_slots_taken") == 3
    assert value(metrics, "branchline_adapter_host_bytes") == memory.host_bytes > 0
    assert value(metrics, "branchline_adapters", state="ready", tier="device") == 3
    name = "branchline_adapter_operation_seconds"
    assert value(metrics, f"{name}_count", operation="load", outcome="ok") == 3
    assert value(metrics, f"{name}_sum", operation="load", outcome="ok") > 0
    with pytest.raises(AdapterNotFoundError):
        served.adapters.load("x", tmp_path / "nowhere")
    refused = value(metrics, f"{name}_count", operation="load", outcome="AdapterNotFoundError")
    assert refused == 1


def test_evictions_are_told(make_family, engine):
    served = make_family("llama").served(max_loras=1, max_cpu_loras=2)
    metrics = Metrics(ServeConfig(), served, engine, model_name="llama")
    before = value(metrics, "branchline_adapter_evictions_total", tier="device")
    for name in ("attn", "mlp", "all", "attn"):
        served(token_ids(1, 4), adapter_names=[name])
    after = value(metrics, "branchline_adapter_evictions_total", tier="device")
    assert after > before
    counters = served.adapters.counters()
    assert after == counters.slot_evictions
    told = value(metrics, "branchline_adapter_evictions_total", tier="host")
    assert told == counters.host_evictions > 0
    operations = samples(metrics)["branchline_adapter_operation_seconds_count"]
    reads = {dict(key)["operation"]: count for key, count in operations.items()}
    assert reads["read"] >= 1


def test_routes_are_those_that_ran(metrics, served):
    zeros = samples(metrics)["branchline_site_routes_total"]
    assert {dict(key)["route"] for key in zeros} == {"fused", "dual", "absorbed", "unfused"}
    before = sum(zeros.values())
    served(token_ids(1, 4))
    served(token_ids(1, 4), adapter_names=["all"])
    told = samples(metrics)["branchline_site_routes_total"]
    expected: dict[tuple[str, str], int] = {}
    for site in served.planner.sites:
        for route, count in site.counters.routes().items():
            key = (site.facts.kind, str(route))
            expected[key] = expected.get(key, 0) + count
    assert sum(told.values()) > before
    for (kind, route), count in expected.items():
        key = (("kind", kind), ("policy", "dual"), ("route", route))
        assert told[key] == count, key


def test_fallbacks_are_told(metrics, served):
    site = served.planner.sites[0]
    before = sum(samples(metrics)["branchline_site_fallbacks_total"].values())
    site.counters.fall_back("strides")
    site.counters.fall_back("something else")
    told = samples(metrics)["branchline_site_fallbacks_total"]
    assert sum(told.values()) == before + 2
    assert "branchline_low_rank_fallbacks_total" in samples(metrics)


def test_the_self_check_is_told_once_there_was_one(metrics, served):
    before = samples(metrics)
    assert before["branchline_routes_out_of_service"][("route", "fused"),] == 0
    assert "branchline_self_check_routes" not in before
    report = check_numerics(served)
    answer = client(metrics, report).get("/metrics")
    told = {
        sample.name: sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert told["branchline_self_check_routes"] == report.routes > 0
    assert told["branchline_self_check_differences"] == 0
    assert told["branchline_self_check_seconds"] == report.seconds
    assert value(metrics, "branchline_saturated_share", kind="norm") == report.saturated["norm"]


def test_routes_out_of_service_are_counted(make_family, engine):
    served = make_family("llama").served(max_loras=3)
    metrics = Metrics(ServeConfig(), served, engine, model_name="llama")
    site = next(s for s in served.planner.plan({}).sites if s.route == Route.FUSED)
    served.planner.withdraw([OutOfService(site.site, site.route, site.producer, "of a test")])
    assert value(metrics, "branchline_routes_out_of_service", route="fused") == 1


# --- over HTTP ----------------------------------------------------------------------------------


def client(metrics: Metrics, readiness: Readiness | None = None) -> TestClient:
    app = FastAPI()
    app.include_router(router)
    app.state.branchline = SimpleNamespace(metrics=metrics, readiness=readiness)
    return TestClient(app)


def test_metrics_are_text_for_prometheus(metrics):
    answer = client(metrics).get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["content-type"] == metrics.exposition("")[1]
    assert list(text_string_to_metric_families(answer.text))


def test_openmetrics_is_given_to_who_asks(metrics):
    accept = "application/openmetrics-text; version=1.0.0"
    answer = client(metrics).get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_every_metric_is_documented(metrics, served):
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    metrics.began("a", 1).ended(FinishReason.STOP, generated=2)
    metrics.tell_readiness(check_numerics(served))
    for family in text_string_to_metric_families(metrics.exposition("")[0].decode()):
        if family.name.startswith(("branchline_", "vllm:")) and not family.name.endswith(
            "_created"
        ):
            assert f"`{family.name}`" in documented, family.name
            assert family.documentation, family.name


def test_errors_are_no_part_of_the_metrics(metrics):
    error = RequestFailedError("request 1", "failed", "try again")
    metrics.began("a", 1).ended(FinishReason.ERROR, generated=0, error=error)
    assert b"try again" not in metrics.exposition("")[0]
