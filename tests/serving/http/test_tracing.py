"""One span an answer, part of the trace that the request names; none without the library."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from branchline.core.errors import NonFiniteError
from branchline.serving.engine.requests import FinishReason
from branchline.serving.http.metrics import Metrics
from branchline.serving.http.tracing import make_tracer
from branchline.serving.serve_config import ServeConfig

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def served(make_family):
    return make_family("llama").wrap()


@pytest.fixture
def metrics(exporter, served) -> Metrics:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Metrics(ServeConfig(), served, None, model_name="llama", tracer=make_tracer(provider))


def test_an_answer_is_a_span_with_its_facts(metrics, exporter):
    meter = metrics.began("sql", 7, digest="abc", request_id="cmpl-1")
    meter.started()
    meter.first_token()
    meter.first_token()
    assert not exporter.get_finished_spans()
    meter.ended(FinishReason.LENGTH, generated=3, cached=2)
    meter.ended(FinishReason.STOP, generated=3)
    (span,) = exporter.get_finished_spans()
    assert span.name == "generate llama"
    assert span.kind == SpanKind.SERVER
    assert span.parent is None
    assert dict(span.attributes or {}) == {
        "gen_ai.request.model": "sql",
        "gen_ai.response.model": "llama",
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "branchline.adapter.name": "sql",
        "branchline.adapter.digest": "abc",
        "branchline.cached_tokens": 2,
    }
    names = [event.name for event in span.events]
    assert names == ["branchline.queued", "branchline.started", "gen_ai.first_token"]
    assert span.status.status_code == StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.events[-1].timestamp <= span.end_time


def test_a_base_answer_names_no_adapter(metrics, exporter):
    metrics.began(None, 1).ended(FinishReason.STOP, generated=1)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "llama"
    assert not [name for name in span.attributes if name.startswith("branchline.adapter")]


@pytest.mark.parametrize("header", ["traceparent", "Traceparent"])
def test_the_caller_s_trace_goes_on(metrics, exporter, header):
    headers = {header: f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    metrics.began(None, 1, headers=headers).ended(FinishReason.STOP, generated=1)
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"


def test_a_trace_that_is_not_sampled_is_not_exported(metrics, exporter):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    metrics.began(None, 1, headers=headers).ended(FinishReason.STOP, generated=1)
    assert not exporter.get_finished_spans()


@pytest.mark.parametrize("value", ["", "00-zz-zz-01", f"00-{'0' * 32}-{PARENT}-01", "\x00" * 200])
def test_a_malformed_header_begins_a_new_trace(metrics, exporter, value):
    metrics.began(None, 1, headers={"traceparent": value}).ended(FinishReason.STOP, generated=1)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_a_failure_is_an_error_with_its_class(metrics, exporter):
    error = NonFiniteError("request '1'", "gave logits that are not finite", "check its weights")
    metrics.began("sql", 1).ended(FinishReason.ERROR, generated=0, error=error)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code == StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "NonFiniteError"


def test_without_the_library_there_are_no_spans(monkeypatch, served):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert make_tracer() is None
    metrics = Metrics(ServeConfig(), served, None, model_name="llama", tracer=make_tracer())
    meter = metrics.began("sql", 1, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    meter.started()
    meter.first_token()
    meter.ended(FinishReason.STOP, generated=1)
