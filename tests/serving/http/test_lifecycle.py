"""A server's life: it listens, loads, serves, is asked to stop, and ends."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}
PROMPT = "the quick brown fox"


class Stream:
    """A streamed completion that is read in a thread."""

    def __init__(self, client: httpx.Client, **body: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.done = False
        self.broken = False
        self._client = client
        self._body = {"prompt": PROMPT, **LONG, **body}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
                for line in answer.iter_lines():
                    self._take(line)
        except httpx.TransportError:
            self.broken = True

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            self.events.append(json.loads(line.removeprefix("data: ")))

    def end(self) -> list[dict[str, Any]]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.events

    @property
    def finish(self) -> str | None:
        found = [
            event["choices"][0]["finish_reason"] for event in self.events if "choices" in event
        ]
        return next((reason for reason in found if reason), None)


@contextmanager
def streaming(server, **body: Any) -> Iterator[Stream]:
    with server.client() as client:
        stream = Stream(client, **body)
        server.wait_for(lambda: len(stream.events) > 3, "no tokens")
        yield stream
        stream.end()
        assert not stream.broken


# --- the start -----------------------------------------------------------------------------------


def test_it_listens_while_it_loads_and_a_signal_then_ends_it(start_server):
    server = start_server(ready=False)
    with server.client() as client:
        assert client.get("/health").json() == {"status": "loading"}
        for path in ("/ready", "/v1/models", "/metrics"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "loaded" in answer.json()["error"]["message"]
            assert "retry-after" in answer.headers
        assert "branchline" in client.get("/version").json()
    assert " ready on " not in server.log
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < 30


# --- what is logged ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick_body() -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}


def test_the_log_has_a_line_for_every_request_and_no_secret(start_server, quick_body):
    server = start_server("--log-format", "json", env={"BRANCHLINE_API_KEY": "hunter2"})
    with server.client() as client:
        body = {"model": "attn", **quick_body}
        assert client.post("/v1/completions", json=body).status_code == 401
        keys = {"Authorization": "Bearer hunter2", "X-Request-Id": "mine-1"}
        answer = client.post("/v1/completions?key=hunter3", json=body, headers=keys)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine-1"
        keys["X-Request-Id"] = 'no\tgood"'
        made = client.get("/v1/models", headers=keys).headers["x-request-id"]
        assert len(made) == 32
        assert client.get("/v1/a%0Ab", headers=keys).status_code == 400
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    requests = [line for line in lines if line["message"] == "request"]
    by_id = {line["request_id"]: line for line in requests}
    assert by_id["mine-1"]["status"] == 200
    assert by_id["mine-1"]["path"] == "/v1/completions"
    assert by_id["mine-1"]["model"] == "attn"
    assert by_id["mine-1"]["completion_tokens"] == 2
    assert by_id[made]["path"] == "/v1/models"
    assert [line["status"] for line in requests] == [401, 200, 200, 400]
    for secret in ("hunter2", "hunter3", PROMPT):
        assert secret not in server.log


def test_a_request_without_an_id_is_given_one(server, quick_body):
    with server.client() as client:
        first, second = (client.post("/v1/completions", json=quick_body) for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    # A text log is one line a request too.
    server.wait_for(lambda: first.headers["x-request-id"] in server.log, "not logged")


# --- adapters under load -------------------------------------------------------------------------


def test_a_request_ends_on_the_adapter_that_it_began_with(server, adapter_folders):
    folder = str(adapter_folders["mlp"])
    with server.client() as client:
        body = {"lora_name": "passing", "lora_path": folder}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        with streaming(server, model="passing", max_tokens=300) as stream:
            named = {"lora_name": "passing"}
            assert client.post("/v1/unload_lora_adapter", json=named).status_code == 200
            gone = client.post("/v1/completions", json={"model": "passing", "prompt": "x"})
            assert gone.status_code == 404
            assert stream.finish is None
        assert stream.finish == "length"
        with streaming(server, model="mlp", max_tokens=300) as same:
            pass
    texts = ["".join(event["choices"][0]["text"] for event in s.events) for s in (stream, same)]
    assert texts[0] == texts[1]


# --- the end -------------------------------------------------------------------------------------


def test_what_runs_is_finished_and_nothing_new_is_taken(start_server, quick_body):
    server = start_server()
    with ExitStack() as running, server.client() as client:
        streams = [
            running.enter_context(streaming(server, model=name, max_tokens=400))
            for name in ("attn", "mlp", "all", server.model) * 2
        ]
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "stopping" in server.log, "does not stop")
        refused = client.post("/v1/completions", json=quick_body)
        assert refused.status_code == 503
        assert "stopping" in refused.json()["error"]["message"]
        assert client.get("/ready").status_code == 503
        assert client.get("/health").json() == {"status": "stopping"}
        assert streams[-1].finish is None
    for stream in streams:
        assert stream.done
        assert stream.finish == "length"
    assert server.process.wait(30) == 0


def test_what_takes_too_long_is_told_so(start_server):
    server = start_server("--shutdown-timeout", "0.2")
    with streaming(server) as stream:
        server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    assert stream.finish is None
    assert stream.events[-1]["error"]["code"] == 503
    assert "not finished" in server.log


def test_a_second_signal_ends_it_at_once(start_server):
    server = start_server()
    with server.client() as client:
        stream = Stream(client)
        server.wait_for(lambda: len(stream.events) > 3, "no tokens")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "stopping" in server.log, "does not stop")
        assert server.stop() == 128 + signal.SIGTERM
        stream.end()
    assert stream.broken
    assert stream.finish is None
