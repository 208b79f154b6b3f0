"""Numbers of the page: rates over the last seconds, and sizes and times for a person."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from ..engine.requests import EngineStats

# Rates are of the last seconds, where somebody looked before; a shorter time would be noise.
_SHORTEST, _LONGEST = 2.0, 30.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Rates:
    """Tokens a second.

    Attributes:
        generated: made.
        prompt: of prompts, computed.
        time: that they are the mean of, readable.
    """

    generated: float
    prompt: float
    time: str


class Throughput:
    """Rates, from what the engine had counted when somebody looked before.

    Args:
        began: when it had counted nothing, by `time.monotonic()`.
    """

    def __init__(self, began: float) -> None:
        self._lock = threading.Lock()
        self._seen: deque[tuple[float, int, int]] = deque([(began, 0, 0)])

    def rates(self, stats: EngineStats, now: float) -> Rates:
        """The mean rates since an earlier look, at best of some seconds ago.

        Args:
            stats: of the engine, now.
            now: `time.monotonic()`.
        """
        with self._lock:
            while len(self._seen) > 1 and now - self._seen[1][0] > _LONGEST:
                self._seen.popleft()
            at, generated, prompt = self._seen[0]
            if now - self._seen[-1][0] >= _SHORTEST:
                self._seen.append((now, stats.generated_tokens, stats.prompt_tokens))
        seconds = max(now - at, 1e-3)
        return Rates(
            (stats.generated_tokens - generated) / seconds,
            (stats.prompt_tokens - prompt) / seconds,
            duration(seconds),
        )


def readable_bytes(nbytes: float) -> str:
    """Such as "3.2 MiB"."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def duration(seconds: float) -> str:
    """Such as "2 h 5 min"; the two largest units."""
    left = max(int(seconds), 0)
    parts = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
