"""A fleet from the command line: deploy, wait for a signal, and take it down."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from ...core.errors import ConfigError, WrapError
from ..http.logs import announce, configure_logging
from ..http.start import LoadedModel, base_names
from .application import application
from .config import FleetConfig

APPLICATION = "branchline"


def run_fleet(config: FleetConfig, load: Callable[[], LoadedModel] | None = None) -> None:
    """Serve by replicas until a signal ends it.

    Args:
        config: of the fleet.
        load: see `application`.

    Raises:
        ConfigError: the address cannot be listened on, or a setting cannot work.
        WrapError: the replicas do not start; says why.
    """
    configure_logging(config.log_level, config.log_format)
    made = application(config, load)
    names = base_names(config, config.model)
    port = _free_port(config)
    host = f"[{config.host}]" if ":" in config.host else config.host
    ended = threading.Event()
    started = time.perf_counter()
    own = not (ray.is_initialized() or os.environ.get("RAY_ADDRESS"))
    ray.init(include_dashboard=False if own else None, ignore_reinit_error=True)
    # Ray installs a handler of its own for the first of them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        serve.start(http_options=HTTPOptions(host=config.host, port=port))
        announce(f"listening on http://{host}:{port}")
        _deploy(made, ended)
        if not ended.is_set():
            seconds = round(time.perf_counter() - started, 2)
            announce(f"ready on http://{host}:{port}", model=names[0], seconds=seconds)
            ended.wait()
        announce(f"stopping; running requests have {config.shutdown_timeout:g} s")
        serve.delete(APPLICATION)
        announce("stopped")
    finally:
        if own:
            serve.shutdown()
        ray.shutdown()


def _deploy(made: serve.Application, ended: threading.Event) -> None:
    """Return when all replicas run, or the end has come before."""
    target = serve.RunTarget(made, name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    while not ended.wait(0.2):
        state = serve.status().applications[APPLICATION]
        if state.status == "RUNNING":
            return
        if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            reasons = [state.message, *(part.message for part in state.deployments.values())]
            logging.getLogger("branchline.ray").debug("%s", "\n".join(reasons))
            raise WrapError("the replicas", f"do not start ({_cause(reasons)})", "see their logs")


def _cause(reasons: list[str]) -> str:
    """The line of a trace that names one of our errors, else the first line."""
    lines = [line.strip() for reason in reasons for line in reason.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("branchline.core.errors.")]
    return (own[-1].partition(": ")[2] if own else lines[0])[:1000] if lines else "unknown"


def _free_port(config: FleetConfig) -> int:
    """The port to listen on; refuses what is taken, since Ray would only log that."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"the address {config.host}:{config.port}",
            f"cannot be listened on ({error.strerror})",
            "choose another --host or --port; port 0 takes a free one",
        ) from error
