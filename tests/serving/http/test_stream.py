"""Streams and their ends: clients that leave, do not read, or are too many."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time

import httpx
import pytest
import torch
from safetensors.torch import load_file

from branchline.core.errors import NonFiniteError
from branchline.serving.http.errors import ApiError
from branchline.serving.http.sse import EventStream, while_connected
from tests.helpers import edit_tensors
from tests.serving.http.inside import client_of, listening, serving

LONG = {"prompt": "the quick", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


class Connection:
    """An ASGI server's side of a connection.

    Args:
        reads: how many messages the client takes before it stops reading.
        leaves: seconds after which it hangs up.
    """

    def __init__(self, reads: float = float("inf"), leaves: float | None = None) -> None:
        self.sent: list[dict] = []
        self._reads = reads
        self._leaves = leaves

    async def receive(self):
        await asyncio.sleep(3600 if self._leaves is None else self._leaves)
        return {"type": "http.disconnect"}

    async def send(self, message) -> None:
        if len(self.sent) >= self._reads:
            await asyncio.sleep(3600)
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def run(connection, events, limit=1024):
    """Answer with `events`; whether they were closed."""
    closed = False

    async def watched():
        nonlocal closed
        try:
            async for event in events():
                yield event
        finally:
            closed = True

    async def answer():
        async with asyncio.timeout(10):
            scope = {"type": "http"}
            await EventStream(watched(), limit)(scope, connection.receive, connection.send)

    asyncio.run(answer())
    return closed


def test_whoever_does_not_read_is_given_up():
    async def endless():
        while True:
            yield b"x" * 100
            await asyncio.sleep(0)

    connection = Connection(reads=2)
    assert run(connection, endless)
    assert len(connection.body) < 2000


def test_whoever_leaves_costs_no_more():
    async def waiting():
        yield b"x"
        await asyncio.sleep(3600)

    assert run(Connection(leaves=0.05), waiting)


def test_an_error_before_the_first_event_has_its_status():
    async def failing():
        if True:
            raise ApiError(404, "nobody")
        yield b""

    connection = Connection()
    assert run(connection, failing)
    assert connection.sent[0]["status"] == 404
    assert json.loads(connection.body)["error"]["message"] == "nobody"


def test_a_later_error_is_an_event_and_the_end():
    async def failing():
        yield b"data: 1\n\n"
        raise NonFiniteError("request 'x'", "overflows", "check it")

    connection = Connection()
    run(connection, failing)
    assert connection.sent[0]["status"] == 200
    first, last, rest = connection.body.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "non_finite"
    assert not connection.sent[-1].get("more_body", False)


def test_work_for_a_client_that_left_is_cancelled():
    cancelled = False

    async def work():
        nonlocal cancelled
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled = True
            raise

    assert asyncio.run(while_connected(Connection(leaves=0.01), work())) is None  # pyright: ignore
    assert cancelled


# --- an engine in this process -------------------------------------------------------------------


@pytest.fixture(scope="module")
def hurried(model_folder, adapter_folders):
    limits = {"request_timeout": 0.3, "max_queue": 2}
    with serving(model_folder, adapter_folders, **limits) as state, client_of(state) as client:
        yield state, client


def test_what_takes_too_long_is_given_up(hurried):
    state, client = hurried
    response = client.post("/v1/completions", json={**LONG, "model": "all"})
    assert response.status_code == 504, response.text
    assert response.json()["error"]["type"] == "TimeoutError"
    streamed = client.post("/v1/completions", json={**LONG, "model": "all", "stream": True})
    assert streamed.status_code == 200
    last = streamed.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 504
    deadline = time.monotonic() + 10
    while state.engine.stats().running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state.engine.stats().running == 0
    version = state.served.adapters._aliases.known("all").version
    # Another request lets the loop see the last updates.
    client.get("/v1/models")
    assert version.leases == 0
    assert 'outcome="timeout"} 2.0' in state.metrics.exposition("")[0].decode()


def test_a_full_queue(hurried):
    state, client = hurried
    with state.admission.admitted(2, None):
        for stream in (False, True):
            response = client.post("/v1/completions", json={**LONG, "stream": stream})
            assert response.status_code == 503
            assert response.headers["Retry-After"] == "1"
    # More than the queue ever holds: no later try would help.
    response = client.post("/v1/completions", json={**LONG, "n": 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert 'refused_requests_total{status="503"} 2.0' in state.metrics.exposition("")[0].decode()


def test_no_requests_while_stopping(hurried):
    state, client = hurried
    state.stopping = True
    try:
        response = client.post("/v1/completions", json=LONG)
    finally:
        state.stopping = False
    assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")


def test_an_adapter_that_overflows_fails_alone(model_folder, adapter_folders, tmp_path):
    folder = tmp_path / "huge"
    shutil.copytree(adapter_folders["all"], folder)
    file = folder / "adapter_model.safetensors"
    edit_tensors(file, {name: torch.full_like(t, 1e18) for name, t in load_file(file).items()})
    with serving(model_folder, {"huge": folder}) as state, client_of(state) as client:
        body = {**LONG, "max_tokens": 4}
        before = client.post("/v1/completions", json=body).json()["choices"]
        for stream in (False, True):
            asked = {**body, "model": "huge", "stream": stream}
            failed = client.post("/v1/completions", json=asked)
            assert failed.status_code == 500
            assert failed.json()["error"]["code"] == "non_finite"
            assert "huge" in failed.json()["error"]["message"]
        assert client.post("/v1/completions", json=body).json()["choices"] == before


def test_a_running_answer_keeps_its_adapter(model_folder, adapter_folders):
    folders = {"x": adapter_folders["attn"]}
    with serving(model_folder, folders) as state, client_of(state) as client:
        body = {**LONG, "max_tokens": 300, "model": "x"}
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json=body).json())
        )
        thread.start()
        deadline = time.monotonic() + 10
        while not state.engine.stats().running and time.monotonic() < deadline:
            time.sleep(0.002)
        state.served.adapters.swap("x", adapter_folders["all"])
        state.served.adapters.unload("x")
        assert thread.is_alive()
        thread.join(60)
        assert answers[0]["choices"][0]["text"] == expected
        assert client.post("/v1/completions", json=body).status_code == 404


# --- over real connections -----------------------------------------------------------------------


def metric(server, name: str) -> float:
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_place(server, stream):
    cancelled = 'branchline_requests_total{adapter="mlp",outcome="cancelled"}'
    before = metric(server, cancelled)
    body = json.dumps({**LONG, "model": "mlp", "stream": stream, "n": 2}).encode()
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream:
            assert b"200 OK" in connection.recv(100)
        else:
            server.wait_for(lambda: metric(server, "vllm:num_requests_running") >= 2, "not running")
    server.wait_for(lambda: metric(server, cancelled) == before + 2, "was not cancelled")
    server.wait_for(lambda: metric(server, "vllm:num_requests_running") == 0, "still runs")


def test_a_key_has_its_share(model_folder):
    keys = {"api_key": ("k1", "k2"), "max_concurrency_per_key": 1}
    first, other = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))
    one = {**LONG, "max_tokens": 1}
    with serving(model_folder, {}, **keys) as state, listening(state) as server:
        url = f"{server.url}/v1/completions"
        body = {**LONG, "stream": True}
        with httpx.stream("POST", url, json=body, headers=first, timeout=60) as running:
            # Kept: a forgotten iterator closes its stream.
            pieces = running.iter_text()
            next(pieces)
            refused = httpx.post(url, json=one, headers=first, timeout=60)
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert httpx.post(url, json=one, headers=other, timeout=60).is_success
        server.wait_for(
            lambda: httpx.post(url, json=one, headers=first, timeout=60).is_success,
            "still refused",
        )
