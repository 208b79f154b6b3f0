"""How many requests are taken at a time, in all and of one key."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ApiError

_RETRY = {"Retry-After": "1"}


class Admission:
    """Counts what runs, and refuses what would be too much.

    Args:
        max_answers: that wait or run at a time.
        max_requests_per_key: of one key at a time; None for any number.
    """

    def __init__(self, max_answers: int, max_requests_per_key: int | None) -> None:
        self._max_answers = max_answers
        self._max_requests_per_key = max_requests_per_key
        self._lock = threading.Lock()
        self._answers = 0
        self._requests: Counter[str] = Counter()

    @property
    def answers(self) -> int:
        """How many answers wait or run now."""
        return self._answers

    @contextmanager
    def admitted(self, answers: int, key: str | None) -> Iterator[None]:
        """Count a request while it is answered.

        Args:
            answers: that it asks for.
            key: which key it came with; None for none.

        Raises:
            ApiError: 400 where it alone is more than the queue holds, 503 where the queue is
                full, 429 where the key has too many already.
        """
        self._enter(answers, key)
        try:
            yield
        finally:
            self._leave(answers, key)

    def _enter(self, answers: int, key: str | None) -> None:
        most = self._max_requests_per_key
        with self._lock:
            if key is not None and most is not None and self._requests[key] >= most:
                raise ApiError(
                    429,
                    f"this key has {most} requests running, the most it may have at a time",
                    code="concurrency_exceeded",
                    headers=_RETRY,
                )
            if answers > self._max_answers:
                raise ApiError(
                    400,
                    f"the request asks for {answers} answers, and the server takes "
                    f"{self._max_answers} at a time (max_queue)",
                    param="n",
                )
            if self._answers + answers > self._max_answers:
                raise ApiError(
                    503,
                    f"{self._answers} answers wait or run already, of at most {self._max_answers}",
                    code="queue_full",
                    headers=_RETRY,
                )
            self._answers += answers
            if key is not None:
                self._requests[key] += 1

    def _leave(self, answers: int, key: str | None) -> None:
        with self._lock:
            self._answers -= answers
            if key is None:
                return
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
