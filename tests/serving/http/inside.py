"""A server's application without a process: its state, and clients of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.testclient import TestClient
from transformers import AutoTokenizer, PreTrainedModel

import branchline
from branchline.serving.engine.engine import Engine
from branchline.serving.http.app import create_app
from branchline.serving.http.metrics import Metrics
from branchline.serving.http.start import guarded
from branchline.serving.http.state import ServerState
from branchline.serving.serve_config import ServeConfig
from tests.serving.http.conftest import Address


@contextmanager
def serving(
    folder: Path,
    adapters: Mapping[str, Path],
    model: PreTrainedModel | None = None,
    **settings,
) -> Iterator[ServerState]:
    """The state of a server whose engine runs; `model` in place of what lies in the folder."""
    config = ServeConfig.checked(**{"quant": "fp8-dynamic", **settings})
    plain = model or branchline.load_model(folder)
    served = branchline.wrap(plain, **config.for_wrap)
    for name, source in adapters.items():
        served.adapters.load(name, source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = Engine(served, config) if plain.can_generate() else None
    metrics = Metrics(config, served, engine, model_name=folder.name)
    state = ServerState(config, served, tokenizer, engine, folder, (folder.name,), metrics)
    if engine is not None:
        engine.start()
    try:
        yield state
    finally:
        if engine is not None:
            engine.stop(10.0)
        state.close()


@contextmanager
def listening(state: ServerState) -> Iterator[Address]:
    """Where `state` is served over real connections, in a thread of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = guarded(create_app(state), state)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Address(f"http://127.0.0.1:{listener.getsockname()[1]}", state.base_name)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def client_of(state: ServerState) -> TestClient:
    """A client of the application of `state`; use it as a context."""
    return TestClient(create_app(state))
