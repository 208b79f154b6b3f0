"""Clients that leave, stall, flood or send nonsense: a status each, and nothing is lost."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serving.http.conftest import RunningServer

JSON = {"content-type": "application/json"}


def head_of(body: bytes) -> bytes:
    """What goes before the body of a completion request."""
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def long_stream(server: RunningServer) -> bytes:
    """A request whose answer takes long."""
    fields = {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True, "stream": True}
    body = json.dumps({"model": server.model, **fields}).encode()
    return head_of(body) + body


def post(server: RunningServer, path: str, content: bytes) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", content=content, headers=JSON, timeout=60)


def completion(server: RunningServer, **body) -> httpx.Response:
    body = {"model": server.model, "prompt": "Hello", "max_tokens": 2, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def metric(server: RunningServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert lines, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def resident_bytes(server: RunningServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith("VmRSS")).split()[1]) * 1024


def is_idle(server: RunningServer) -> bool:
    return metric(server, "vllm:num_requests_running") == 0


def test_client_that_disconnects_ends_its_work(server):
    address = urlsplit(server.url)
    request = long_stream(server)
    for _ in range(4):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(request)
            assert connection.recv(2000)
    server.wait_for(lambda: is_idle(server), "work of clients that left goes on")
    assert completion(server).status_code == 200


def test_client_that_does_not_read_does_not_hold_up_others(server):
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.sendall(long_stream(server))
    begun = time.monotonic()
    for _ in range(5):
        assert completion(server).status_code == 200
    assert time.monotonic() - begun < 60
    connection.close()
    server.wait_for(lambda: is_idle(server), "the slow client's work goes on")


async def _flood(server: RunningServer, requests: int, connections: int = 32) -> set[bytes]:
    """Status lines of many small requests; over plain sockets, for clients cost more than they."""
    address = urlsplit(server.url)
    numbers = iter(range(requests))
    statuses: set[bytes] = set()

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for number in numbers:
            model = ["attn", "mlp", "all", server.model][number % 4]
            body = json.dumps({"model": model, "prompt": f"{number}", "max_tokens": 1}).encode()
            writer.write(head_of(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            statuses.add(head.partition(b"\r\n")[0])
            length = next(
                x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")
            )
            await reader.readexactly(int(length.split(b":")[1]))
        writer.close()

    await asyncio.gather(*(connection() for _ in range(connections)))
    return statuses


def test_thousands_of_small_requests_and_memory_is_back_to_level(server):
    assert asyncio.run(_flood(server, 1000)) == {b"HTTP/1.1 200 OK"}
    before = resident_bytes(server)
    assert asyncio.run(_flood(server, 2000)) == {b"HTTP/1.1 200 OK"}
    server.wait_for(lambda: is_idle(server), "work of answered requests goes on")
    # Ten kilobytes that a request leaves behind would be seen.
    assert resident_bytes(server) - before < 20 * 2**20


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"model": "x"', 400),
        (b"\xff\xfe{}", 400),
        (b'{"model": "\xff", "prompt": "a"}', 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 50_000, 400),
        (b"x" * 5 * 1024 * 1024, 413),
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "null",
        "cut2",
        "utf16",
        "utf8",
        "deep",
        "deep2",
        "5MB",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"]
)
def test_bodies_that_are_no_request(server, path, content, status):
    response = post(server, path, content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"]
    assert error["code"] == status


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": -1},
        {"max_tokens": 0},
        {"max_tokens": 10**9},
        {"max_tokens": "many"},
        {"temperature": -0.1},
        {"temperature": 1e9},
        {"top_p": 0},
        {"top_p": 1.5},
        {"n": 0},
        {"n": 10**6},
        {"logprobs": -1},
        {"logprobs": 10**6},
        {"stop": [""] * 3},
        {"stop": ["x"] * 100},
        {"seed": 2**70},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"999999999": 1}},
        {"logit_bias": {"a": 1}},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [-1]},
        {"prompt": [10**9]},
        {"prompt": 7},
        {"prompt": {"a": 1}},
        {"stream": "perhaps"},
        {"frobnicate": True},
        {"best_of": 5, "n": 2},
        {"suffix": "x"},
    ],
    ids=lambda change: next(iter(change.items())).__repr__()[:30],
)
def test_values_out_of_range_are_named(server, change):
    response = completion(server, **change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert next(iter(change)) in f"{error['param']} {error['message']}"


def test_nan_is_no_number(server):
    content = f'{{"model": "{server.model}", "prompt": "a", "temperature": NaN}}'.encode()
    assert post(server, "/v1/completions", content).status_code == 400


@pytest.mark.parametrize(
    "path",
    ["/etc", "../../../../etc", "file:///etc", "/etc/passwd", "", "a\0b", "http://127.0.0.1:1/x"],
)
def test_sources_outside_of_the_roots_are_refused(server, path):
    body = {"lora_name": "escape", "lora_path": path}
    response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)
    assert response.status_code in (400, 403, 404), response.text
    assert "root:" not in response.text
    assert "escape" not in httpx.get(f"{server.url}/v1/models").text


def test_links_out_of_the_roots_are_refused(server, adapter_folders, tmp_path):
    link = next(iter(adapter_folders.values())).parent / "link"
    link.symlink_to("/etc")
    try:
        body = {"lora_name": "link", "lora_path": str(link)}
        response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert response.status_code in (400, 403, 404)
    finally:
        link.unlink()


def test_zip_bomb_is_refused(server, adapter_folders):
    bomb = next(iter(adapter_folders.values())).parent / "bomb.zip"
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_config.json", "{}")
        with archive.open("adapter_model.safetensors", "w", force_zip64=True) as file:
            for _ in range(256):
                file.write(bytes(1024 * 1024))
    bomb.write_bytes(inner.getvalue())
    try:
        before = resident_bytes(server)
        body = {"lora_name": "bomb", "lora_path": str(bomb)}
        response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert response.status_code == 400, response.text
        assert resident_bytes(server) - before < 256 * 2**20
    finally:
        bomb.unlink()
