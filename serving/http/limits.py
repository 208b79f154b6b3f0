"""Bodies: how long they may be, how long they may take, and that they are text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..serve_config import ServeConfig
from .errors import ApiError

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
# A client that is still writing reads no answer: what it sends is thrown away for a moment.
_DRAINED_SECONDS = 2.0
_DRAINED_BYTES = 64 * 2**20


class ClientGoneError(Exception):
    """The client hung up before its body was complete."""


class BodyLimit:
    """Reads a request's body before anything else sees it.

    Args:
        app: is handed the whole body.
        config: says how long it may be, and may take.
        refused: is told the status of what is refused.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, refused: Callable[[int], None]) -> None:
        self._app = app
        self._refused = refused
        self._most = config.max_body_bytes
        self._seconds = config.request_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as refusal:
            self._refused(refusal.status)
            await refusal.response()(scope, receive, send)
            return
        except ClientGoneError:
            return
        handed = False

        async def replay() -> Message:
            nonlocal handed
            if handed:
                return await receive()
            handed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        if _declared_length(scope) > self._most:
            await self._drain(receive)
            raise self._too_long()
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._collect(receive)
        except TimeoutError as error:
            raise ApiError(
                408, "the body did not arrive in time", headers={"Connection": "close"}
            ) from error
        _check_text(scope, body)
        return body

    async def _collect(self, receive: Receive) -> bytes:
        body, more = bytearray(), True
        while more:
            piece, more = await _next_piece(receive)
            body += piece
            if len(body) > self._most:
                if more:
                    await self._drain(receive)
                raise self._too_long()
        return bytes(body)

    async def _drain(self, receive: Receive) -> None:
        left, more = _DRAINED_BYTES, True
        try:
            async with asyncio.timeout(_DRAINED_SECONDS):
                while more and left > 0:
                    piece, more = await _next_piece(receive)
                    left -= len(piece)
        except TimeoutError:
            return

    def _too_long(self) -> ApiError:
        message = f"the body is longer than the {self._most} bytes that max_body_bytes allows"
        # Whatever still comes is not read: it must not be taken for the next request.
        return ApiError(413, message, headers={"Connection": "close"})


async def _next_piece(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


def _declared_length(scope: Scope) -> int:
    """By its header, which the HTTP parser has checked; 0 for a chunked body."""
    return max((int(v) for name, v in scope["headers"] if name == b"content-length"), default=0)


def _check_text(scope: Scope, body: bytes) -> None:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    if not any(b"json" in kind.lower() for kind in kinds):
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8", param="body") from error
