"""One replica: a whole server but for its socket, in a process of Ray's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from ...core.errors import AdapterError, EngineStoppedError
from ...core.team import SideThreads
from ..http.app import create_app
from ..http.errors import ApiError
from ..http.logs import RequestLog, configure_logging
from ..http.start import LoadedModel, guarded, make_state
from ..http.state import ServerState
from .asgi import Forwarded, Head, Reply, replied, whole
from .config import FleetConfig
from .table import Table, follow, model_of

FLEET = "branchline-fleet"

logger = logging.getLogger("branchline.ray")

_T = TypeVar("_T")

# The fleet answers at once; what takes longer is a fleet that is not there.
_AGREE_SECONDS = 5.0


@dataclass(frozen=True)
class Answered:
    """What one replica answered.

    Attributes:
        replica: its id.
        reply: what it said.
        digests: by name, of what it has loaded now.
    """

    replica: str
    reply: Reply
    digests: dict[str, str]


class Replica:
    """Serves what the endpoint forwards, with the adapters of the fleet.

    Args:
        config: of the fleet.
        names: of the base model.
        load: loads the model without adapters.

    Raises:
        BranchlineError: the model, the engine or an adapter of the start cannot be served.
    """

    async def __init__(
        self, config: FleetConfig, names: tuple[str, ...], load: Callable[[], LoadedModel]
    ) -> None:
        configure_logging(config.log_level, config.log_format)
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._fleet = serve.get_deployment_handle(FLEET, app_name=context.app_name)
        self._table = Table()
        self._missing: dict[str, str] = {}
        self._fault = ""
        # Not yet sure to be reached by what the whole fleet is told.
        self._new = True
        # Changes of one replica are made one after the other.
        self._thread = SideThreads(1, "branchline-follow")

        def make() -> tuple[ServerState, ASGIApp]:
            state = make_state(load(), config, names)
            return state, RequestLog(guarded(create_app(state), state))

        self._state, self._app = await self._in_thread(make)
        await self._follow(await self._fleet.table.remote())
        # Whoever was first to read the adapters of the start says what they are.
        await self._follow(await self._fleet.settle.remote(self._digests()))
        multiplexed: Any = serve.multiplexed(max_num_models_per_replica=_slots(config))
        self._hold: Callable[[str], Awaitable[str]] = multiplexed(_held)

    # --- requests -------------------------------------------------------------------------------

    async def answer(self, request: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        """What the server answers: its head, then pieces of its body."""
        if self._new:
            self._new = not await self._agree()
        name = model_of(request)
        if name is not None and name not in self._table.entries:
            if name not in self._state.base_names:
                await self._agree()
        elif name is not None:
            # Tells the endpoint's router that the adapter is in use here. Its weights come with
            # the request's lease, whose errors the route tells.
            await self._hold(name)
        async with aclosing(replied(self._chosen(name), request)) as parts:
            async for part in parts:
                yield part

    async def ask(self, request: Forwarded) -> Answered:
        """A whole answer, to what every replica is asked."""
        reply = await whole(self._app, request)
        return Answered(self._id, reply, await self._in_thread(self._digests))

    def _chosen(self, name: str | None) -> ASGIApp:
        reason = self._missing.get(name or "")
        if not reason:
            return self._app
        return ApiError(503, reason, param="model", code="adapter_broken").response()

    # --- the table of the fleet -----------------------------------------------------------------

    async def take(self, table: Table) -> None:
        """Have the adapters of `table`, and no others.

        It is the one before a change that some replica refused, or the one after it.
        """
        if table.generation < self._table.generation:
            return
        before = set(self._missing)
        await self._follow(table)
        lost = sorted(self._missing.keys() - before)
        if lost:
            self._fault = self._missing[lost[0]]

    async def _agree(self) -> bool:
        """Follow the fleet where it is ahead; False where it cannot say."""
        try:
            async with asyncio.timeout(_AGREE_SECONDS):
                table: Table | None = await self._fleet.agree.remote(self._table)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the table of the fleet cannot be asked for: %s", error)
            return False
        if table is not None and table.generation > self._table.generation:
            await self._follow(table)
        return table is not None

    async def _follow(self, table: Table) -> None:
        self._missing = await self._in_thread(lambda: take_over(self._state, table))
        for reason in self._missing.values():
            logger.error("an adapter of the fleet is not served by this replica: %s", reason)
        self._table = table

    def _digests(self) -> dict[str, str]:
        return _digests(self._state)

    # --- life -----------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """See Ray Serve: whoever raises here is replaced.

        Raises:
            EngineStoppedError: the engine died.
            AdapterError: the adapters are not those of the fleet.
        """
        engine = self._state.engine
        if engine is not None and not engine.alive:
            cause = "was stopped" if engine.error is None else f"died of {engine.error!r}"
            raise EngineStoppedError("the engine", cause, "replace the replica")
        if self._fault:
            raise AdapterError("this replica", self._fault, "replace it")
        await self._agree()

    async def __del__(self) -> None:
        state = self.__dict__.get("_state")
        if state is None:
            return
        state.stopping = True
        if state.engine is not None:
            await asyncio.to_thread(state.engine.stop, state.config.shutdown_timeout)
        state.close()
        self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def take_over(state: ServerState, table: Table) -> dict[str, str]:
    """Follow a table, and check the routes of what came by it; gives why entries are missing.

    Raises:
        AdapterError: as in `follow`.
    """
    before = _digests(state)
    missing = follow(state.served.adapters, table)
    for name, digest in _digests(state).items():
        if before.get(name) != digest:
            state.checks.loaded(name)
    return missing


def _digests(state: ServerState) -> dict[str, str]:
    return {info.name: info.digest for info in state.served.adapters.list()}


async def _held(name: str) -> str:
    return name


def _slots(config: FleetConfig) -> int:
    """How many adapters a replica has on its device at once."""
    return max(1, config.tier_limits.count)
