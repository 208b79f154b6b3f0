"""One server process, from the moment that it listens to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from starlette.types import ASGIApp

from ...core.errors import ConfigError
from ..serve_config import ServeConfig
from .gate import Gate, Phase
from .logs import RequestLog, announce, configure_logging
from .start import Loader, guarded, make_state
from .state import ServerState

logger = logging.getLogger("branchline.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 2048
# Longer than clients keep an idle connection (httpx, and with it openai's client, 5 s): one that
# both ends give up at the same moment fails a request.
_IDLE_SECONDS = 75
_LONGEST_HEADERS = 64 * 1024
# What has been answered may still have to be sent to slow readers.
_SENDING_SECONDS = 5


def run_server(config: ServeConfig, loader: Loader, names: tuple[str, ...]) -> None:
    """Listen, load, serve, and return when a signal has ended it.

    Args:
        config: of the server.
        loader: loads the model, in a thread.
        names: of the base model.

    Raises:
        ConfigError: the address cannot be listened on.
        BranchlineError: the model, an adapter or the engine cannot be served.
    """
    configure_logging(config.log_level, config.log_format)
    # The event loop holds the interpreter up to so long while the engine's thread waits for it
    # between two kernels; the default is as long as a step.
    sys.setswitchinterval(0.0005)
    listening = _listen(config)
    server = _Server(config, loader, names)
    with asyncio.Runner(loop_factory=server.uvicorn.config.get_loop_factory()) as runner:
        runner.run(server.run(listening))


def _listen(config: ServeConfig) -> socket.socket:
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(_BACKLOG)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"the address {config.host}:{config.port}",
            f"cannot be listened on ({error.strerror})",
            "choose another --host or --port; port 0 takes a free one",
        ) from error
    return made


def _url(config: ServeConfig, listening: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listening.getsockname()[1]}"


class _Uvicorn(uvicorn.Server):
    """uvicorn, without its own answer to signals: it would end running requests first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """A server and its ways to end."""

    def __init__(self, config: ServeConfig, loader: Loader, names: tuple[str, ...]) -> None:
        self._config = config
        self._loader = loader
        self._names = names
        self._gate = Gate()
        self._state: ServerState | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self.uvicorn = _Uvicorn(
            uvicorn.Config(
                RequestLog(self._gate),
                # The one that bounds what a request's headers may take.
                http="h11",
                h11_max_incomplete_event_size=_LONGEST_HEADERS,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_SENDING_SECONDS,
            )
        )

    async def run(self, listening: socket.socket) -> None:
        """Serve until the end."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        url = _url(self._config, listening)
        serving = asyncio.create_task(self.uvicorn.serve(sockets=[listening]))
        announce(f"listening on {url}")
        self._warn_of_strangers(url)
        loading = asyncio.create_task(self._load(url))
        ended = asyncio.create_task(self._end.wait())
        await asyncio.wait({serving, loading, ended}, return_when=asyncio.FIRST_COMPLETED)
        failure = loading.exception() if loading.done() else None
        if failure is None:
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        self.uvicorn.should_exit = True
        await serving
        ended.cancel()
        if self._state is not None:
            self._state.close()
        if failure is not None:
            raise failure
        if not loading.done():
            _end_now(0)

    # --- the start ------------------------------------------------------------------------------

    async def _load(self, url: str) -> None:
        """Load what is served, and open the gate for it."""
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[tuple[ServerState, ASGIApp]] = loop.create_future()

        def load() -> None:
            try:
                made = self._make()
            # Whatever it is, it is raised again by whoever awaits the model.
            except Exception as error:
                loop.call_soon_threadsafe(loaded.set_exception, error)
            else:
                loop.call_soon_threadsafe(loaded.set_result, made)

        # A daemon: whoever stops the server now does not wait for the disk.
        threading.Thread(target=load, name="branchline-start", daemon=True).start()
        self._state, app = await loaded
        self._state.stopping = self._gate.phase is Phase.STOPPING
        self._gate.open(app)
        if self._gate.phase is Phase.SERVING:
            seconds = round(time.perf_counter() - started, 2)
            adapters = len(self._state.served.adapters.list())
            announce(f"ready on {url}", model=self._names[0], adapters=adapters, seconds=seconds)

    def _make(self) -> tuple[ServerState, ASGIApp]:
        # Importing the routes takes a while, in which probes are answered already.
        from .app import create_app

        state = make_state(self._loader(), self._config, self._names)
        return state, guarded(create_app(state), state)

    def _warn_of_strangers(self, url: str) -> None:
        local = self._config.host in ("127.0.0.1", "::1", "localhost")
        if local or self._config.api_key or self._config.admin_key:
            return
        may = "load adapters and use" if self._config.allow_runtime_lora_updating else "use"
        logger.warning("there are no keys: whoever reaches %s may %s this server", url, may)

    # --- the end --------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if self._stopping is not None:
            announce("stopping at once")
            _end_now(128 + number)
        announce(
            f"stopping; running requests have {self._config.shutdown_timeout:g} s",
            signal=signal.Signals(number).name,
        )
        self._gate.close()
        self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        state, finished = self._state, True
        if state is not None:
            state.stopping = True
            if state.engine is not None:
                with ThreadPoolExecutor(1, "branchline-stop") as thread:
                    finished = await asyncio.get_running_loop().run_in_executor(
                        thread, state.engine.stop, self._config.shutdown_timeout
                    )
            finished = await self._gate.emptied(_SENDING_SECONDS) and finished
        announce("stopped" if finished else "stopped; some requests were not finished")
        self._end.set()


def _end_now(code: int) -> None:
    """End the process without waiting for threads that cannot be interrupted."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
