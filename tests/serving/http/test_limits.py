"""Bodies that are too long, too slow or no text."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from branchline.serving.http.limits import BodyLimit
from branchline.serving.serve_config import ServeConfig

LIMIT = 100


@pytest.fixture
def refused() -> list[int]:
    return []


@pytest.fixture
def ask(refused: list[int]):
    """POST a body (bytes, or pieces of one) to an application that tells the body's length."""

    async def told(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    app = Starlette(routes=[Route("/", told, methods=["GET", "POST"])])
    config = ServeConfig.checked(max_body_bytes=LIMIT, request_timeout=0.3)
    transport = httpx.ASGITransport(BodyLimit(app, config, refused.append))

    def ask(content, method: str = "POST", **headers: str) -> httpx.Response:
        async def asked() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, "/", content=content, headers=headers)

        return asyncio.run(asked())

    return ask


async def pieces(*parts: bytes, wait: float = 0.0) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(wait)


def test_a_body_of_any_kind_up_to_the_limit_arrives_whole(ask, refused):
    assert ask(b"x" * LIMIT).text == str(LIMIT)
    assert ask(pieces(b"x" * 60, b"", b"y" * 40)).text == str(LIMIT)
    assert ask(b"").text == "0"
    assert ask(None, method="GET").text == "0"
    assert refused == []


def test_a_longer_one_is_refused_by_its_header_or_when_it_gets_too_long(ask, refused):
    declared = ask(b"x" * (LIMIT + 1))
    chunked = ask(pieces(b"x" * 60, b"y" * 41, b"z" * 5))
    for answer in (declared, chunked):
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"
        assert str(LIMIT) in answer.json()["error"]["message"]
    assert refused == [413, 413]


def test_a_body_that_does_not_come_is_given_up(ask, refused):
    answer = ask(pieces(b"x", b"y", b"z", wait=0.25))
    assert answer.status_code == 408
    assert refused == [408]


def test_json_that_is_no_utf_8_is_a_bad_request(ask):
    body = '{"prompt": "ä"}'.encode("latin-1")
    answer = ask(body, **{"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body"
    assert ask(body, **{"content-type": "text/plain"}).status_code == 200


# --- over a real connection ----------------------------------------------------------------------


def forever() -> Iterator[bytes]:
    for _ in range(80):
        yield b" " * 2**16


def test_a_real_client_that_sends_too_much_reads_the_refusal(server):
    with server.client() as client:
        for content in (forever(), b" " * (2**22 + 1)):
            answer = client.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["type"] == "RequestTooLargeError"
        assert client.get("/health").status_code == 200


def test_headers_are_bounded(server):
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        # Without an end to the headers: a server that kept them all would wait for more for ever.
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"x-long: " + b"y" * 2**18)
            answer = connection.recv(2**16)
            assert not answer or answer.startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_real_json_that_is_no_utf_8_or_nested_too_deep_is_a_bad_request(server):
    with server.client(headers={"content-type": "application/json"}) as client:
        for content in (b'{"prompt": "\xff"}', b"[" * 200_000, b"{", b"\xef\xbb\xbf{}", b""):
            answer = client.post("/v1/load_lora_adapter", content=content)
            assert answer.status_code == 400, content[:20]
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
