"""The one endpoint before all replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.errors import ApiError, encode_event
from ..http.gate import not_ready
from ..http.limits import BodyLimit
from ..http.sse import gone
from .asgi import Forwarded, Head, Reply
from .config import FleetConfig
from .fleet import ask_all, reply_of
from .merge import merged_listing, merged_metrics, merged_readiness
from .replica import Answered
from .table import is_change, model_of

logger = logging.getLogger("branchline.ray")

#: What all replicas are asked, and how their answers become one.
_OF_ALL: Final[dict[tuple[str, str], Callable[[Sequence[Answered]], Reply]]] = {
    ("GET", "/v1/adapters"): merged_listing,
    ("GET", "/ready"): merged_readiness,
    ("GET", "/metrics"): merged_metrics,
}
# Ray's own server adds the id that came with the request, and closes connections as it likes.
_NOT_PASSED_ON = frozenset({b"x-request-id", b"connection"})
_TRIES = 3


class _LostError(Exception):
    """The replica that was to answer is gone."""


class Endpoint:
    """Hands every request to the replica that has its adapter in use, or to all of them.

    Keys are checked by the replicas, each request's by whoever answers it.

    Args:
        config: of the fleet.
        names: of the base model.
        replicas: of the fleet.
        fleet: keeps the table.
    """

    def __init__(
        self,
        config: FleetConfig,
        names: tuple[str, ...],
        replicas: DeploymentHandle,
        fleet: DeploymentHandle,
    ) -> None:
        self._config = config
        self._base_names = frozenset(names)
        self._replicas = replicas
        self._fleet = fleet
        self._adapters: frozenset[str] = frozenset()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """See `ray.serve.ingress`."""
        limited = BodyLimit(self._http, self._config, _log_refusal)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await limited(scope, receive, send)
            elif scope["type"] == "lifespan":
                await _live(receive, send)
            else:
                await send({"type": "websocket.close", "code": 1000})

        return app

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await JSONResponse({"status": "ok"})(scope, receive, send)
            return
        body = await _read(receive)
        answering = asyncio.ensure_future(self._answer(Forwarded.of(scope, body), send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, request: Forwarded, send: Send) -> None:
        merge = _OF_ALL.get((request.method, request.path))
        if merge is not None:
            await _send_whole(await self._of_all(request, merge), send)
        elif is_change(request):
            await _send_whole(await self._changed(request), send)
        else:
            await self._of_one(request, send)

    # --- all replicas ---------------------------------------------------------------------------

    async def _of_all(
        self, request: Forwarded, merge: Callable[[Sequence[Answered]], Reply]
    ) -> Reply:
        try:
            answers = await ask_all(self._replicas, request, self._config.request_timeout)
        except TimeoutError:
            return reply_of(ApiError(504, "a replica did not answer in time"))
        if not answers:
            return reply_of(not_ready("no replica is running"))
        refused = next((answer.reply for answer in answers if not answer.reply.ok), None)
        return refused or merge(answers)

    async def _changed(self, request: Forwarded) -> Reply:
        try:
            return await self._fleet.change.remote(request)
        except (RayActorError, RayServeException) as error:
            logger.error("a change was lost: %s", error)
            return reply_of(not_ready("the table of adapters is being restored"))

    # --- one replica ----------------------------------------------------------------------------

    async def _of_one(self, request: Forwarded, send: Send) -> None:
        handle = self._replicas.options(
            stream=True, multiplexed_model_id=await self._adapter_of(request)
        )
        for _ in range(_TRIES):
            try:
                await _pass_on(handle.answer.remote(request), send)
            except _LostError:
                # Nothing was sent, so that another replica may answer.
                continue
            return
        await _send_whole(reply_of(not_ready("the replica died")), send)

    async def _adapter_of(self, request: Forwarded) -> str:
        """The adapter that a request names; "" for none.

        A name that the fleet does not have is none: routers remember what they are asked for.
        """
        name = model_of(request)
        if name is None or name in self._base_names:
            return ""
        if name not in self._adapters:
            try:
                self._adapters = await self._fleet.names.remote()
            except (RayActorError, RayServeException) as error:
                logger.warning("the table of the fleet cannot be asked for: %s", error)
                return ""
        return name if name in self._adapters else ""


async def _pass_on(parts: Any, send: Send) -> None:
    """Send what a replica answers, as it comes.

    Raises:
        _LostError: it is gone, and nothing was sent.
    """
    head: Head | None = None
    try:
        async for part in parts:
            if isinstance(part, Head):
                head = part
                await _send_head(part, send)
            else:
                await send({"type": "http.response.body", "body": part, "more_body": True})
    except BackPressureError:
        refusal = ApiError(
            503, "too many requests wait already", code="queue_full", headers={"Retry-After": "1"}
        )
        await _send_whole(reply_of(refusal), send)
        return
    except (RayActorError, RayServeException) as error:
        logger.warning("a replica was lost: %s", error)
        if head is None:
            raise _LostError from error
        await _end_lost(head, send)
        return
    except RayTaskError as error:
        logger.error("a replica failed: %s", error)
        if head is None:
            failure = ApiError(500, "the server failed to answer this request; its log says why")
            await _send_whole(reply_of(failure), send)
            return
        await _end_lost(head, send)
        return
    finally:
        parts.cancel()
    await send({"type": "http.response.body", "body": b""})


async def _end_lost(head: Head, send: Send) -> None:
    """End a reply that its replica will not end: a stream by an event that says so."""
    kinds = [value for name, value in head.headers if name == b"content-type"]
    if not any(kind.startswith(b"text/event-stream") for kind in kinds):
        # Less than its length: the client sees that it is cut off.
        raise ConnectionResetError("the replica died in the middle of its answer")
    lost = not_ready("the replica died in the middle of its answer")
    await send({"type": "http.response.body", "body": encode_event(lost.body)})


async def _send_head(head: Head, send: Send) -> None:
    headers = [(name, value) for name, value in head.headers if name not in _NOT_PASSED_ON]
    await send({"type": "http.response.start", "status": head.status, "headers": headers})


async def _send_whole(reply: Reply, send: Send) -> None:
    await _send_head(reply.head, send)
    await send({"type": "http.response.body", "body": reply.body})


async def _read(receive: Receive) -> bytes:
    """The body; `BodyLimit` has read it before, so that this does not wait."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def _live(receive: Receive, send: Send) -> None:
    """Nothing is to be started or stopped here."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})


def _log_refusal(status: int) -> None:
    logger.info("a body was refused", extra={"facts": {"status": status}})
