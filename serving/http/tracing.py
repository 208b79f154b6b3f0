"""OpenTelemetry spans of requests, where its library is installed; else there are none.

One span a generated answer, with the attributes of OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/) and ours under "branchline.".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ...core.errors import BranchlineError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

_SCOPE = "branchline"


class RequestSpan(Protocol):
    """The span of one answer."""

    def event(self, name: str, *, ago: float = 0.0) -> None:
        """Something happened.

        Args:
            name: what.
            ago: seconds since then.
        """
        ...

    def end(
        self, outcome: str, *, generated: int, cached: int, error: BranchlineError | None
    ) -> None:
        """It is over."""
        ...


class RequestTracer(Protocol):
    """Makes the spans of answers."""

    def request(
        self,
        *,
        model: str,
        adapter: str | None,
        digest: str | None,
        prompt_tokens: int,
        request_id: str,
        headers: Mapping[str, str],
    ) -> RequestSpan:
        """A span that begins now.

        Args:
            model: the base model's name.
            adapter: the adapter's; None for none.
            digest: of its content.
            prompt_tokens: how many.
            request_id: as the client is told.
            headers: of the request; a W3C traceparent makes the span part of that trace.
        """
        ...


def make_tracer(provider: TracerProvider | None = None) -> RequestTracer | None:
    """A tracer of answers; None where opentelemetry-api is not installed.

    Args:
        provider: where spans go; None for the process's, which does nothing unless whoever starts
            the process sets one (opentelemetry-instrument does).
    """
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        return None
    return OpenTelemetryTracer(trace.get_tracer(_SCOPE, tracer_provider=provider))


class OpenTelemetryTracer:
    """Spans by opentelemetry-api.

    Args:
        tracer: makes them.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def request(
        self,
        *,
        model: str,
        adapter: str | None,
        digest: str | None,
        prompt_tokens: int,
        request_id: str,
        headers: Mapping[str, str],
    ) -> RequestSpan:
        """See `RequestTracer.request`."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = {name.lower(): value for name, value in headers.items()}
        carrier = {name: given[name] for name in ("traceparent", "tracestate") if name in given}
        attributes: dict[str, str | int] = {
            "gen_ai.request.model": model if adapter is None else adapter,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": prompt_tokens,
        }
        if request_id:
            attributes["gen_ai.response.id"] = request_id
        if adapter is not None:
            attributes["branchline.adapter.name"] = adapter
        if digest is not None:
            attributes["branchline.adapter.digest"] = digest
        span = self._tracer.start_span(
            f"generate {model}",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        span.add_event("branchline.queued")
        return _OpenTelemetrySpan(span)


class _OpenTelemetrySpan:
    def __init__(self, span: Span) -> None:
        self._span = span

    def event(self, name: str, *, ago: float = 0.0) -> None:
        self._span.add_event(name, timestamp=time.time_ns() - round(ago * 1e9))

    def end(
        self, outcome: str, *, generated: int, cached: int, error: BranchlineError | None
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": generated,
                "gen_ai.response.finish_reasons": [outcome],
                "branchline.cached_tokens": cached,
            }
        )
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()
