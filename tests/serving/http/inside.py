"""A server's application without a process: its state, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from starlette.testclient import TestClient
from transformers import AutoTokenizer, PreTrainedModel

import branchline
from branchline.serving.engine.engine import Engine
from branchline.serving.http.app import create_app
from branchline.serving.http.metrics import Metrics
from branchline.serving.http.state import ServerState
from branchline.serving.serve_config import ServeConfig


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
    given = config.model_fields_set & branchline.WrapConfig.model_fields.keys()
    served = branchline.wrap(plain, **{name: getattr(config, name) for name in given})
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


def client_of(state: ServerState) -> TestClient:
    """A client of the application of `state`; use it as a context."""
    return TestClient(create_app(state))
