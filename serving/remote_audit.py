"""The audit of a running server, by its address."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from ..core.errors import RemoteAuditError
from ..policies.audit.report import AuditReport
from ..policies.audit.schema import parse_report

_SECONDS = 60.0
_MOST_BYTES = 1 << 30
_WANTS_A_KEY = (401, 403)


class RemoteAudit:
    """Asks one server for its audit.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        api_key: a key that is good for administrators; None where it asks for none.
        policies: to audit as if by; none for the one in force.
    """

    def __init__(self, url: str, api_key: str | None = None, policies: Iterable[str] = ()) -> None:
        self.url = url.rstrip("/")
        # A name and a password before the host are nobody else's business.
        scheme, separator, rest = self.url.partition("://")
        self._shown = f"{scheme}{separator}{rest.rpartition('@')[2]}"
        self._policies = tuple(policies)
        if api_key is not None and not api_key.isascii():
            raise RemoteAuditError(
                f"server {self._shown!r}",
                "is given a key that no header can hold",
                "pass one of its admin keys (command line: --api-key)",
            )
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(headers=headers, timeout=_SECONDS)

    def __enter__(self) -> RemoteAudit:
        return self

    def __exit__(self, *raised: object) -> None:
        self._client.close()

    def _get(self, asked: Mapping[str, Any]) -> tuple[int, str, bytes]:
        """Status, where a redirect leads, and the body; within a time and a size."""
        deadline, body = time.monotonic() + _SECONDS, bytearray()
        with self._client.stream("GET", f"{self.url}/audit", params=asked) as answer:
            for part in answer.iter_bytes():
                body += part
                if len(body) > _MOST_BYTES or time.monotonic() > deadline:
                    raise httpx.ReadTimeout(
                        f"its answer takes more than {_SECONDS:g} s or {_MOST_BYTES} bytes"
                    )
            where = answer.headers.get("location", "") if answer.is_redirect else ""
            return answer.status_code, where, bytes(body)

    def report(self, tokens: int = 64) -> AuditReport:
        """What the server says now.

        Args:
            tokens: of the batches that bytes and seconds are counted for.

        Raises:
            RemoteAuditError: it cannot be reached, wants a key, or refuses.
            ConfigError: it answers with another version of the schema.
        """
        asked = {"tokens": str(tokens), "policy": list(self._policies)}
        subject = f"server {self._shown!r}"
        try:
            status, where, body = self._get(asked)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"cannot be reached ({type(error).__name__}: {error})"
            raise RemoteAuditError(
                subject, reason, "check the address, and that branchline serve runs there"
            ) from error
        if status in _WANTS_A_KEY:
            raise RemoteAuditError(
                subject, "wants a key", "pass one of its admin keys (command line: --api-key)"
            )
        text = body.decode("utf-8", "replace")
        if where:
            raise RemoteAuditError(subject, f"sends on to {where}", "name that address")
        if status != httpx.codes.OK:
            reason = f"answers {status}: {_message(text)}"
            raise RemoteAuditError(subject, reason, "see the server's log")
        report = parse_report(text, f"the audit of {subject}")
        return report.model_copy(update={"source": "server"})


def _message(text: str) -> str:
    """What an error of OpenAI's shape says, or how another one begins."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text[:200]
