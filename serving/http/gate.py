"""What stands before the routes, and answers while there are none yet, or no more."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from importlib.metadata import version
from typing import Any

import torch
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .auth import OPEN_PATHS
from .errors import ApiError


class Phase(StrEnum):
    """Where a server stands."""

    LOADING = "loading"
    SERVING = "serving"
    STOPPING = "stopping"


def version_facts() -> dict[str, str]:
    """What `/version` tells."""
    names = ("branchline", "torch", "transformers", "peft")
    # torch's own has the build ("+cu130"), which its metadata may lack.
    return {name: version(name) for name in names} | {"torch": torch.__version__}


class Gate:
    """Lets requests through to the application while it serves.

    Attributes:
        phase: where the server stands.
        running: requests in the application now.
    """

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.running = 0
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """Serve by `app` from now on, unless the server stops already."""
        self._app = app
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    def close(self) -> None:
        """Take no more requests; those that run go on."""
        self.phase = Phase.STOPPING

    async def emptied(self, seconds: float) -> bool:
        """Wait until no request runs any more; whether that took no longer than `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self.running:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        passes = self.phase is Phase.SERVING or scope["path"] in OPEN_PATHS
        if self._app is None or not passes:
            await self._own_answer(scope["path"])(scope, receive, send)
            return
        self.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.running -= 1

    def _own_answer(self, path: str) -> Response:
        if path == "/health":
            return JSONResponse({"status": str(self.phase)})
        if path == "/version":
            return JSONResponse(version_facts())
        reasons = {
            Phase.LOADING: "the model is being loaded",
            Phase.STOPPING: "the server is stopping",
        }
        return not_ready(reasons[self.phase]).response()


def not_ready(reason: str, **details: Any) -> ApiError:
    """The answer to what cannot be served now, and may be served soon, or elsewhere."""
    return ApiError(503, reason, code="not_ready", headers={"Retry-After": "1"}, **details)
