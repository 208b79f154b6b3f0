"""Responses that end when the client is gone, or does not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, encode_event, told

# Seconds that a connection has to take something, once as much waits as may.
_PATIENCE = 1.0

T = TypeVar("T")
logger = logging.getLogger("branchline.http")

#: The end of a stream in OpenAI's interface.
DONE = b"data: [DONE]\n\n"


async def gone(receive: Receive) -> None:
    """Return when the client has closed the connection; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None where the client left, and the work was cancelled.

    Args:
        request: whose body has been read.
        work: to do.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        await _end(working, leaving)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Outgoing:
    """Events between whoever makes them and the connection.

    Args:
        limit: most bytes that may wait.

    Attributes:
        error: why there is no more; None while there may be, or where nothing failed.
    """

    def __init__(self, limit: int) -> None:
        self.error: ApiError | None = None
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False

    async def put(self, chunk: bytes) -> bool:
        """Whether there is room for it, now or in a moment."""
        if self._size + len(chunk) > self._limit and self._chunks:
            # Much may come at once: the connection has to be let run before it can be blamed.
            self._taken.clear()
            try:
                await asyncio.wait_for(self._taken.wait(), _PATIENCE)
            except TimeoutError:
                return False
        self._chunks.append(chunk)
        self._size += len(chunk)
        self._changed.set()
        return True

    def end(self, error: ApiError | None = None) -> None:
        """Nothing more comes, because of `error` if there is one."""
        self.error = error
        self._ended = True
        self._changed.set()

    async def take(self) -> bytes | None:
        """All that waits, as soon as anything does; None at the end."""
        while not self._chunks:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        chunk = b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        self._taken.set()
        return chunk


class EventStream(Response):
    """Server-sent events.  The status is sent with the first event, so that an error before it is
    answered by its own; a later one is an event, and the end.

    Args:
        events: encoded ones; it is closed when the client leaves, or does not read.
        limit: most bytes kept for a client that does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], limit: int) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"
        self._events = events
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        outgoing = _Outgoing(self._limit)
        sending = asyncio.ensure_future(self._send(outgoing, scope, receive, send))
        filling = asyncio.ensure_future(self._fill(outgoing))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            pending = {sending, filling, leaving}
            while pending and not sending.done() and not leaving.done():
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if filling.done() and not filling.result():
                    logger.warning("a streaming client does not read; its request is cancelled")
                    return
            if sending.done():
                sending.result()
        finally:
            await _end(sending, filling, leaving)

    async def _fill(self, outgoing: _Outgoing) -> bool:
        """Whether all events found room."""
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not await outgoing.put(event):
                        return False
        except Exception as error:
            # Nobody above can answer once a stream has begun; `told` logs what is unexpected.
            outgoing.end(told(error))
        else:
            outgoing.end()
        return True

    async def _send(self, outgoing: _Outgoing, scope: Scope, receive: Receive, send: Send) -> None:
        chunk = await outgoing.take()
        if chunk is None and outgoing.error is not None:
            await outgoing.error.response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while chunk is not None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await outgoing.take()
        last = b"" if outgoing.error is None else encode_event(outgoing.error.body)
        await send({"type": "http.response.body", "body": last})
