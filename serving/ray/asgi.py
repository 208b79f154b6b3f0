"""Requests and replies as values, that travel from the endpoint to a replica and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Forwarded:
    """A request whose body has been read.

    Attributes:
        method: in capitals.
        path: decoded.
        raw_path: as it was sent.
        query: as it was sent, without "?".
        headers: names in lower case.
        body: whole.
        client: host and port of whoever sent it; None where nobody knows.
    """

    method: str
    path: str
    raw_path: bytes = b""
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    client: tuple[str, int] | None = None

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Forwarded:
        """What an ASGI server hands to its application.

        Args:
            scope: of the request.
            body: of the request.
        """
        client = scope.get("client")
        return cls(
            scope["method"],
            scope["path"],
            scope.get("raw_path") or scope["path"].encode(),
            scope.get("query_string", b""),
            tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            body,
            None if client is None else (client[0], client[1]),
        )

    def scope(self) -> Scope:
        """The same for an application."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.raw_path or self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


@dataclass(frozen=True)
class Head:
    """How a reply begins.

    Attributes:
        status: of the response.
        headers: of the response.
    """

    status: int
    headers: Headers


@dataclass(frozen=True)
class Reply:
    """A whole reply.

    Attributes:
        head: how it begins.
        body: all of it.
    """

    head: Head
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether what was asked was done."""
        return self.head.status < 400


async def replied(app: ASGIApp, request: Forwarded) -> AsyncGenerator[Head | bytes, None]:
    """What `app` answers: its head, then the pieces of its body as they come.

    To the application, closing this generator is the client's leaving.

    Args:
        app: answers.
        request: to be answered.

    Raises:
        Exception: what the application raises.
    """
    # Unbounded: the application itself limits what waits for a reader.
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left, handed = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal handed
        if not handed:
            handed = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(request.scope(), receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                yield Head(message["status"], tuple((bytes(n), bytes(v)) for n, v in headers))
            elif message.get("body"):
                yield bytes(message["body"])
        await running
    finally:
        left.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def whole(app: ASGIApp, request: Forwarded) -> Reply:
    """What `app` answers, when all of it is there.

    Raises:
        Exception: what the application raises.
    """
    head, body = Head(500, ()), bytearray()
    async with aclosing(replied(app, request)) as parts:
        async for part in parts:
            if isinstance(part, Head):
                head = part
            else:
                body += part
    return Reply(head, bytes(body))
