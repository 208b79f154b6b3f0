"""From a wrapped model to a server's state and application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from ...core.errors import ConfigError
from ..engine.engine import Engine
from ..model import ServedModel
from ..serve_config import ServeConfig
from .auth import KeyGuard
from .limits import BodyLimit
from .metrics import Metrics
from .state import ServerState
from .tracing import make_tracer


@dataclass(frozen=True)
class LoadedModel:
    """What a server serves.

    Attributes:
        served: the model, with the adapters of the start.
        tokenizer: its.
        folder: it came from.
    """

    served: ServedModel
    tokenizer: Any
    folder: Path


#: Loads what is served; it may take minutes, and runs in a thread of its own.
Loader = Callable[[], LoadedModel]


def base_names(config: ServeConfig, folder: Path) -> tuple[str, ...]:
    """What requests may call the base model, before it is loaded.

    Raises:
        ConfigError: an adapter of the start has such a name, or is for a model of another one.
    """
    names = config.served_model_name or (folder.resolve().name,)
    for module in config.modules:
        subject = f"adapter '{module.name}'"
        if module.name in names:
            raise ConfigError(subject, "has the base model's name", "choose another name for one")
        if module.base_model_name not in (None, *names):
            raise ConfigError(
                subject,
                f"is for {module.base_model_name!r}, but the base model is {names[0]!r}",
                "correct base_model_name, or give the model that name too (command line: "
                "--served-model-name)",
            )
    return names


def make_state(loaded: LoadedModel, config: ServeConfig, names: Sequence[str]) -> ServerState:
    """The state of a server whose routes have been checked, and whose engine runs.

    Args:
        loaded: what is served.
        config: how.
        names: of the base model.

    Raises:
        WrapError, ConfigError: see `Engine`.
    """
    served = loaded.served
    # An encoder answers with embeddings only, which take no engine.
    continues = served.can_generate() and not served.config.is_encoder_decoder
    engine = Engine(served, config, seed=config.seed) if continues else None
    metrics = Metrics(config, served, engine, model_name=names[0], tracer=make_tracer())
    state = ServerState(
        config, served, loaded.tokenizer, engine, loaded.folder, tuple(names), metrics
    )
    state.checks.at_start()
    if engine is not None:
        engine.start()
    return state


def guarded(app: ASGIApp, state: ServerState) -> ASGIApp:
    """`app` behind the keys and the limits of its server."""
    refused = state.metrics.refused
    return KeyGuard(BodyLimit(app, state.config, refused), state.config, refused)
