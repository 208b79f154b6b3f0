"""Metrics of a server: what requests took, beside what engine and adapters count themselves.

Whoever makes an answer calls `Metrics.began` when it is handed to the engine, then
`RequestMeter.first_token` and `RequestMeter.ended`.  A request that never gets so far is counted
by `Metrics.refused`.  Everything else is read where it is kept when somebody asks
(`collectors.py`).  Names and labels are listed in docs/metrics.md.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from enum import StrEnum

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from ...core.errors import BranchlineError
from ..engine.requests import FinishReason
from ..model import ServedModel
from ..self_check import Readiness
from ..serve_config import ServeConfig
from .collectors import (
    AdapterCollector,
    EngineCollector,
    RouteCollector,
    RunningEngine,
    SelfCheckCollector,
)
from .tracing import RequestSpan, RequestTracer

router = APIRouter()

#: The label of requests for the base model; no adapter can be called so.
BASE = "__base__"
#: The label of adapters beyond those that have series of their own.
OTHER = "other"

_MOST_ADAPTERS = 100
_IDLE_SECONDS = 600.0

_LATENCY = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_TOKEN_LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
_LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Outcome(StrEnum):
    """How a request ended that the engine was handed.

    As `FinishReason`, and `timeout`: it took longer than request_timeout.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    TIMEOUT = "timeout"


class AdapterLabels:
    """Which adapters have series of their own: a bounded number, so that names cost no memory.

    The first ones get one.  A further one takes the place of whichever was idle for longest, where
    that was long enough for its last values to have been read; if none was, it is `OTHER`.

    Args:
        most: series at a time.
        idle: seconds without a request after which a series may go.
    """

    def __init__(self, most: int, idle: float) -> None:
        self._most = most
        self._idle = idle
        self._lock = threading.Lock()
        # By name, how many requests run and when the last one ended; the longest idle first.
        self._running: dict[str, int] = {}
        self._idle_since: OrderedDict[str, float] = OrderedDict()

    def enter(self, name: str | None, now: float) -> tuple[str, str | None]:
        """The label of a request that begins, and whose series are to go for it."""
        if name is None or name == OTHER:
            return (BASE if name is None else OTHER), None
        with self._lock:
            gone = None
            if name not in self._running:
                if len(self._running) >= self._most:
                    gone = self._longest_idle(now)
                    if gone is None:
                        return OTHER, None
                    del self._running[gone], self._idle_since[gone]
                self._running[name] = 0
            self._running[name] += 1
            self._idle_since.pop(name, None)
            return name, gone

    def leave(self, label: str, now: float) -> None:
        """A request with that label has ended."""
        if label in (BASE, OTHER):
            return
        with self._lock:
            self._running[label] -= 1
            if not self._running[label]:
                self._idle_since[label] = now

    def _longest_idle(self, now: float) -> str | None:
        first = next(iter(self._idle_since.items()), None)
        return first[0] if first is not None and now - first[1] >= self._idle else None


class RequestMeter:
    """Times one answer; any thread, one call at a time.

    Args:
        metrics: what it is counted in.
        label: of its adapter.
        prompt_tokens: of its prompt.
        span: what is traced of it; None where nothing is.
    """

    def __init__(
        self, metrics: Metrics, label: str, prompt_tokens: int, span: RequestSpan | None
    ) -> None:
        self._metrics = metrics
        self._label = label
        self._prompt_tokens = prompt_tokens
        self._span = span
        self._began = time.perf_counter()
        self._first: float | None = None
        self._over = False

    def started(self, at: float | None = None) -> None:
        """It left the queue: its first forward began.

        Args:
            at: when, by `time.perf_counter()`; None for now.
        """
        now = time.perf_counter()
        began = now if at is None else at
        self._metrics.queue_time.observe(max(began - self._began, 0.0))
        if self._span is not None:
            self._span.event("branchline.started", ago=now - began)

    def first_token(self) -> None:
        """Its first token was made; further calls change nothing."""
        if self._first is not None:
            return
        self._first = time.perf_counter()
        self._metrics.first_token_time.observe(self._first - self._began)
        if self._span is not None:
            self._span.event("gen_ai.first_token")

    def ended(
        self,
        outcome: Outcome | FinishReason,
        *,
        generated: int,
        cached: int = 0,
        error: BranchlineError | None = None,
    ) -> None:
        """It is over; further calls change nothing (a time-out and the engine may both tell).

        Args:
            outcome: how.
            generated: tokens that were made.
            cached: tokens of the prompt that were taken from the prefix cache.
            error: why it failed.
        """
        if self._over:
            return
        self._over = True
        now = time.perf_counter()
        first = now if self._first is None else self._first
        pace = (now - first) / (generated - 1) if generated > 1 else None
        self._metrics.count(
            self._label, Outcome(outcome.value), now - self._began, pace,
            self._prompt_tokens, generated, cached,
        )  # fmt: skip
        if self._span is not None:
            self._span.end(outcome.value, generated=generated, cached=cached, error=error)


class Metrics:
    """The metrics of one server, in a registry of their own: several may live in one process.

    Args:
        config: of the server.
        served: whose adapters and routes are counted.
        engine: whose requests are; None for a server without one.
        model_name: of the base model, as requests name it.
        tracer: makes the spans of requests; None for none.
    """

    def __init__(
        self,
        config: ServeConfig,
        served: ServedModel,
        engine: RunningEngine | None,
        *,
        model_name: str,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._tracer = tracer
        self._model_name = model_name
        self._labels = AdapterLabels(_MOST_ADAPTERS, _IDLE_SECONDS)
        if engine is not None:
            registry.register(EngineCollector(engine, config, model_name))
        registry.register(AdapterCollector(served.adapters))
        registry.register(RouteCollector(served))
        self._self_checks = SelfCheckCollector(served)
        registry.register(self._self_checks)
        ProcessCollector(registry=registry)
        GCCollector(registry)
        self._make_counters(registry)
        self._make_histograms(registry)

    def _make_counters(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"branchline_{name}", documentation, labels, registry=registry)

        self._requests = counter(
            "requests", "Answers that ended, by adapter and outcome.", "adapter", "outcome"
        )
        self._prompt = counter("prompt_tokens", "Tokens of prompts of ended answers.", "adapter")
        self._cached = counter(
            "cached_prompt_tokens", "Of these, taken from the prefix cache.", "adapter"
        )
        self._generated = counter("generated_tokens", "Tokens of ended answers.", "adapter")
        self._refused = counter(
            "refused_requests", "Requests that the engine was not handed, by status.", "status"
        )

    def _make_histograms(self, registry: CollectorRegistry) -> None:
        def histogram(
            name: str, documentation: str, buckets: tuple[float, ...] = _LATENCY
        ) -> Histogram:
            full = f"branchline_{name}"
            return Histogram(full, documentation, buckets=buckets, registry=registry)

        self.queue_time = histogram("queue_seconds", "From the request to its first forward.")
        self.first_token_time = histogram(
            "time_to_first_token_seconds", "From the request to the first token of its answer."
        )
        self._token_time = histogram(
            "time_per_output_token_seconds",
            "Mean time of an answer's tokens after the first.",
            _TOKEN_LATENCY,
        )
        self._request_time = histogram("request_seconds", "From the request to its answer's end.")
        self._prompt_length = histogram(
            "request_prompt_tokens", "Tokens of one answer's prompt.", _LENGTHS
        )
        self._answer_length = histogram(
            "request_generated_tokens", "Tokens of one answer.", _LENGTHS
        )

    # --- what requests tell ---------------------------------------------------------------------

    def began(
        self,
        adapter: str | None,
        prompt_tokens: int,
        *,
        digest: str | None = None,
        request_id: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> RequestMeter:
        """The engine is about to be handed one answer to make; n answers are n calls.

        Args:
            adapter: its name, once it is known that there is such a one; None for the base model.
            prompt_tokens: how many.
            digest: of the adapter's content.
            request_id: as the client is told.
            headers: of the HTTP request; "traceparent" and "tracestate" are read.

        Returns:
            what the rest is told; its `ended` must be called, whatever happens.
        """
        label, gone = self._labels.enter(adapter, time.monotonic())
        if gone is not None:
            for counter in (self._requests, self._prompt, self._cached, self._generated):
                counter.remove_by_labels({"adapter": gone})
        span = None
        if self._tracer is not None:
            span = self._tracer.request(
                model=self._model_name,
                adapter=adapter,
                digest=digest,
                prompt_tokens=prompt_tokens,
                request_id=request_id,
                headers=headers or {},
            )
        return RequestMeter(self, label, prompt_tokens, span)

    def refused(self, status: int) -> None:
        """A request was answered with an error before the engine was handed anything.

        Args:
            status: of the HTTP answer.
        """
        self._refused.labels(str(status)).inc()

    def answers(self) -> Mapping[str, int]:
        """Answers that ended, by adapter, of those that have series of their own."""
        found: dict[str, int] = {}
        for family in self._requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    adapter = sample.labels["adapter"]
                    found[adapter] = found.get(adapter, 0) + int(sample.value)
        return found

    def count(
        self,
        label: str,
        outcome: Outcome,
        seconds: float,
        token_seconds: float | None,
        prompt_tokens: int,
        generated: int,
        cached: int,
    ) -> None:
        """Count an answer that ended; `RequestMeter.ended` calls it."""
        self._requests.labels(label, outcome.value).inc()
        self._prompt.labels(label).inc(prompt_tokens)
        self._cached.labels(label).inc(cached)
        self._generated.labels(label).inc(generated)
        self._request_time.observe(seconds)
        self._prompt_length.observe(prompt_tokens)
        self._answer_length.observe(generated)
        if token_seconds is not None:
            self._token_time.observe(token_seconds)
        # Last: until then the label's series must not go.
        self._labels.leave(label, time.monotonic())

    # --- what scrapers read ---------------------------------------------------------------------

    def tell_readiness(self, report: Readiness | None) -> None:
        """What is told of the self-check from now on.

        Args:
            report: of the last one; None before the first.
        """
        self._self_checks.report = report

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in a format that the Accept header names, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # A version that is none: the format that everybody reads.
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type


@router.get("/metrics", include_in_schema=False)
def metrics(request: Request) -> Response:
    """All metrics, for Prometheus; not guarded by keys, as scrapers bring none."""
    # No coroutine: what is read takes locks that loading may hold for a moment.
    state = request.app.state.branchline
    found: Metrics = state.metrics
    found.tell_readiness(state.readiness)
    body, content_type = found.exposition(request.headers.get("accept", ""))
    return Response(body, media_type=content_type)
