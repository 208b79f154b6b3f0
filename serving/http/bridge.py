"""From the engine's thread to an event loop: one wake-up for whatever a step brings."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

from ..engine.requests import Sink, Update

Receive = Callable[[Update], None]


class Bridge:
    """Carries updates into one event loop.

    Args:
        loop: where they are received.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._arrived: deque[tuple[Receive, Update]] = deque()
        self._woken = False

    def sink(self, receive: Receive) -> Sink:
        """A sink that hands what it is given to `receive`, in the event loop and in order."""

        def take(update: Update) -> None:
            with self._lock:
                self._arrived.append((receive, update))
                if self._woken:
                    return
                self._woken = True
            self._wake()

        return take

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop was closed, and whoever waited in it is gone; the engine's thread goes on.
            if not self._loop.is_closed():
                raise

    def _deliver(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
            self._woken = False
        for receive, update in arrived:
            receive(update)


class Bridges:
    """The bridge of each event loop; a server has one loop, tests may have several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bridges: WeakKeyDictionary[asyncio.AbstractEventLoop, Bridge] = WeakKeyDictionary()

    def here(self) -> Bridge:
        """The one of the loop that runs."""
        loop = asyncio.get_running_loop()
        with self._lock:
            bridge = self._bridges.get(loop)
            if bridge is None:
                bridge = self._bridges[loop] = Bridge(loop)
            return bridge
