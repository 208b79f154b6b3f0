"""Keys: who may ask for answers, and who may change what is served."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import Final

from pydantic import SecretStr
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from ..serve_config import ServeConfig
from .errors import ApiError

#: What probes and scrapers read without a key: it tells of no prompt, and changes nothing.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/version", "/metrics"})
#: The page is the same for everybody; what it shows, it asks for with the key that is typed in.
_PAGE: Final = "/"
_ADMIN_PATHS: Final = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters", "/adapters", "/audit"}
)
_ADMIN_FOLDERS: Final = ("/adapters/", "/v1/adapters/", "/audit/")


def key_of(connection: HTTPConnection) -> str | None:
    """What tells the key of a request from other keys, and does not tell the key; None for none."""
    return connection.scope.get("state", {}).get("key")


class KeyGuard:
    """Refuses requests without a key that is good for them.

    What is neither open nor an administrator's needs one of the keys of requests: routes that
    nobody has thought of are guarded too.

    Args:
        app: answers the others.
        config: has the keys.
        refused: is told the status of what is refused.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, refused: Callable[[int], None]) -> None:
        self._app = app
        self._refused = refused
        self._request_keys = _hashes(config.api_key)
        self._admin_keys = _hashes(config.admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                self._refused(refusal.status)
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = scope["path"]
        if any(not character.isprintable() for character in path):
            # A route's pattern would also match a path with a line's end behind it.
            return ApiError(400, "the path holds a character that cannot be printed")
        given = _bearer(scope)
        is_request_key = given is not None and _is_one_of(given, self._request_keys)
        is_admin_key = given is not None and _is_one_of(given, self._admin_keys)
        if given is not None and (is_request_key or is_admin_key):
            scope.setdefault("state", {})["key"] = given.hex()
        if path in OPEN_PATHS or path == _PAGE:
            return None
        if self._admin_keys and _is_admin(path):
            if is_admin_key:
                return None
            return _not_an_admin() if is_request_key else _unauthorized(given)
        if not self._request_keys or is_request_key or is_admin_key:
            return None
        return _unauthorized(given)


def _is_admin(path: str) -> bool:
    # Routes are found with or without a slash at their end.
    return path.rstrip("/") in _ADMIN_PATHS or path.startswith(_ADMIN_FOLDERS)


def _hashes(keys: Iterable[SecretStr]) -> tuple[bytes, ...]:
    # As they came from the environment: a key need not be UTF-8.
    texts = (key.get_secret_value().strip() for key in keys)
    return tuple(hashlib.sha256(t.encode(errors="surrogateescape")).digest() for t in texts)


def _is_one_of(given: bytes, known: tuple[bytes, ...]) -> bool:
    """In a time that does not tell which one, nor how much of it was right."""
    found = False
    for key in known:
        found |= hmac.compare_digest(given, key)
    return found


def _bearer(scope: Scope) -> bytes | None:
    """The hash of the request's key; None where it brings none."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        return None
    return hashlib.sha256(key.strip()).digest()


def _unauthorized(given: bytes | None) -> ApiError:
    message = (
        "no key was given; send it as Authorization: Bearer KEY"
        if given is None
        else "the key is not known here"
    )
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _not_an_admin() -> ApiError:
    return ApiError(
        403, "this key may ask for answers, but not change or list adapters", code="admin_only"
    )
