"""What the server logs: lines for a person or a collector, one of them for every request.

No prompt, no answer and no key is ever logged.  Only the loggers of this package and of uvicorn are
configured; those of other libraries are left to whoever runs the process.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import MutableMapping
from typing import Any, Final

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..serve_config import LogFormat, LogLevel

ROOT_LOGGER: Final = "branchline"
#: What is always said, whatever the level: where the server listens, and when it is ready.
ANNOUNCEMENTS: Final = "branchline.server"
_REQUESTS: Final = "branchline.requests"
# Orchestrators ask every few seconds.
_PROBES = frozenset({"/health", "/ready", "/metrics", "/version"})
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PLAIN = re.compile(r"[^\s\"'=\\]+")

logger = logging.getLogger(_REQUESTS)


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO message key=value`, always one line but for tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = f"{self.formatTime(record)} {record.levelname} {_one_line(record.getMessage())}"
        facts = "".join(f" {key}={_plain(value)}" for key, value in _facts(record).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return line + facts + trace


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the record has besides."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        fields: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # ASCII: whatever a client put into a path or a header stays one line.
        return json.dumps(fields, default=str)


def configure_logging(level: LogLevel, form: LogFormat) -> None:
    """Send the logs of this package and of uvicorn to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    chosen = logging.getLevelNamesMapping()[level.upper()]
    # uvicorn tells of its own starting and stopping, which is told here already.
    levels = {ROOT_LOGGER: chosen, "uvicorn": max(chosen, logging.WARNING)}
    for name, threshold in levels.items():
        configured = logging.getLogger(name)
        configured.handlers = [handler]
        configured.propagate = False
        configured.setLevel(threshold)
    logging.getLogger(ANNOUNCEMENTS).setLevel(min(chosen, logging.INFO))


def announce(message: str, **facts: object) -> None:
    """Log what is always said."""
    logging.getLogger(ANNOUNCEMENTS).info(message, extra={"facts": facts})


def request_id_of(connection: HTTPConnection) -> str:
    """The id of a request: its X-Request-Id if that is sane, else one that was made."""
    return _state(connection.scope)["request_id"]


def log_facts(connection: HTTPConnection) -> dict[str, object]:
    """What the line of this request tells besides; write names and counts into it, no texts.

    Usual keys: model, adapter, prompt_tokens, completion_tokens.
    """
    return _state(connection.scope).setdefault("log_facts", {})


class RequestLog:
    """Gives every request an id, and logs its end.

    Args:
        app: answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = _state(scope)
        state["request_id"] = request_id = _request_id(scope)
        status, started = 0, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # What was answered by 500 was logged with its trace, and starlette raises it again.
            if status != 500:
                raise
        finally:
            _log_request(scope, status, time.perf_counter() - started)


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    state = _state(scope)
    facts = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": scope["path"],
        # 0: the client was gone before it was told anything.
        "status": status,
        "ms": round(seconds * 1000, 1),
        **state.get("log_facts", {}),
    }
    level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
    logger.log(level, "request", extra={"facts": facts})


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if _SANE_ID.fullmatch(given):
                return given
    return uuid.uuid4().hex


def _state(scope: Scope) -> MutableMapping[str, Any]:
    return scope.setdefault("state", {})


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "facts", {})


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _plain(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isascii() else json.dumps(text)
