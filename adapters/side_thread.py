"""A thread beside the batches, made when there is something to do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..core.team import SideThreads


class SideThread:
    """Does one thing after the other; each process has its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._executor: SideThreads | None = None
        self._process = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call `function` on the thread, when what was submitted before is done."""
        with self._lock:
            if self._executor is None or self._process != os.getpid():
                # A fork takes the executor along, but not its thread.
                self._executor, self._process = SideThreads(1, self._name), os.getpid()
            return self._executor.submit(function, *arguments)

    def close(self) -> None:
        """Drop what has not begun; what has, ends by itself."""
        with self._lock:
            if self._executor is not None and self._process == os.getpid():
                self._executor.shutdown(wait=False, cancel_futures=True)
