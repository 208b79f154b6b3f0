"""The table of a fleet, and its changes: by all replicas, or by none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ..http.errors import ApiError
from ..http.gate import not_ready
from .asgi import Forwarded, Head, Reply
from .replica import Answered
from .table import Change, Entry, Table, change_of

logger = logging.getLogger("branchline.ray")


class Fleet:
    """Keeps which adapters all replicas have, and has them change together.

    A fleet that was restarted takes the table over from its replicas.

    Args:
        replicas: of the fleet.
        sources: of the adapters of the start, by name.
        timeout: seconds that a change may take.
    """

    def __init__(
        self, replicas: DeploymentHandle, sources: Mapping[str, str], timeout: float
    ) -> None:
        self._replicas = replicas
        self._timeout = timeout
        self._table = Table(0, {name: Entry(source) for name, source in sources.items()})
        self._changing = asyncio.Lock()

    async def table(self) -> Table:
        """The table, after the change that is being made."""
        async with self._changing:
            return self._table

    async def names(self) -> frozenset[str]:
        """Of the adapters; does not wait for a change."""
        return frozenset(self._table.entries)

    async def settle(self, digests: dict[str, str]) -> Table:
        """The table, after a replica has told what it read of the adapters of the start.

        Args:
            digests: by name.
        """
        async with self._changing:
            self._table = self._table.settled(digests)
            return self._table

    async def agree(self, table: Table) -> Table | None:
        """The table, or that of the replica if it is later; None while a change is made.

        Waits for nothing: replicas ask while they are asked to change.

        Args:
            table: of a replica.
        """
        if self._changing.locked():
            return None
        if table.generation > self._table.generation:
            self._table = table
        return self._table

    async def change(self, request: Forwarded) -> Reply:
        """Have every replica make a change; where one refuses, none has made it.

        Args:
            request: to load, to swap or to unload, that every replica checks and answers itself.

        Returns:
            the first refusal; else what the first replica answered.
        """
        async with self._changing:
            wanted = change_of(request)
            try:
                answers = await self._ask(request)
            except TimeoutError:
                # Its own timeouts are longer, so that this is a replica that hangs.
                await self._tell(self._table)
                return reply_of(ApiError(504, "a replica did not answer; nothing was changed"))
            refusal = _refusal(answers, wanted)
            if refusal is None and wanted is not None and answers:
                self._table = self._table.changed(wanted, _digest(answers[0], wanted))
            if any(answer.reply.ok for answer in answers):
                await self._tell(self._table)
            return refusal or answers[0].reply

    async def _ask(self, request: Forwarded) -> list[Answered]:
        return await ask_all(self._replicas, request, self._timeout)

    async def _tell(self, table: Table) -> None:
        """Have all replicas follow `table`; one that cannot reports itself as unhealthy."""
        told = self._replicas.broadcast("take", table)
        for outcome in await told.results_async(timeout_s=self._timeout, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.error("a replica did not follow the fleet: %s", outcome)


async def ask_all(replicas: DeploymentHandle, request: Forwarded, timeout: float) -> list[Answered]:
    """What every replica answers; those that died meanwhile are left out.

    Args:
        replicas: of the fleet.
        request: that each of them is asked.
        timeout: seconds.

    Raises:
        TimeoutError: one of them did not answer in time.
        Exception: what a replica raised.
    """
    try:
        asked = replicas.broadcast("ask", request)
        found: list[Any] = await asked.results_async(timeout_s=timeout, return_exceptions=True)
    except RayServeException:
        return []
    for answer in found:
        if isinstance(answer, BaseException) and not isinstance(
            answer, RayActorError | RayServeException
        ):
            raise answer
    return [answer for answer in found if isinstance(answer, Answered)]


def _refusal(answers: list[Answered], wanted: Change | None) -> Reply | None:
    if not answers:
        return reply_of(not_ready("no replica is running"))
    refused = next((answer for answer in answers if not answer.reply.ok), None)
    if refused is not None:
        return refused.reply
    if wanted is None:
        return reply_of(ApiError(400, "the body does not name an adapter", param="body"))
    if len({_digest(answer, wanted) for answer in answers}) > 1:
        message = f"the replicas read different contents from {wanted.source!r}"
        return reply_of(ApiError(400, message, type="InvalidUserInput"))
    return None


def _digest(answer: Answered, wanted: Change) -> str:
    return answer.digests.get(wanted.name, "")


def reply_of(error: ApiError) -> Reply:
    """An error as a replica would answer it."""
    response = error.response()
    return Reply(Head(response.status_code, tuple(response.raw_headers)), bytes(response.body))
