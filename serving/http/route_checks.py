"""The self-checks of a server: at its start, of what is loaded later, and of what had no slot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING

from ...core.errors import AdapterNotFoundError, EngineStoppedError
from ..self_check import Readiness, check_numerics

if TYPE_CHECKING:
    from ...adapters.lease import Lease
    from ..model import ServedModel

logger = logging.getLogger("branchline.self_check")

#: Runs a call in the thread that runs forwards, while none runs.
Between = Callable[[Callable[[], Readiness]], Future[Readiness]]


class RouteChecks:
    """Compares the routes of every content once, before its first request at the latest.

    A check needs a slot, and takes an idle one.  Where batches keep them all it is made between
    two of them, and requests wait so long.  Any thread may ask, but for the one that runs forwards.

    Args:
        served: the model.
        between: of what runs the forwards.

    Attributes:
        latest: the report of the last check; None before.
    """

    def __init__(self, served: ServedModel, between: Between) -> None:
        self.latest: Readiness | None = None
        self._served = served
        self._between = between
        # Whoever asks for a content that is being checked waits for that.
        self._lock = threading.Lock()
        self._checked: frozenset[str] = frozenset()

    def at_start(self) -> Readiness:
        """Check base rows and the adapters that are loaded; no forwards run yet."""
        with self._lock:
            before = self._digests()
            self.latest = found = check_numerics(self._served)
            self._remember(found, before)
        _tell(found)
        return found

    def loaded(self, name: str) -> None:
        """Check what a name was given; whatever is met, requests are served rightly."""
        digest = self._digests().get(name)
        if digest is not None:
            self._check(name, digest, again=True)

    def before_use(self, lease: Lease) -> None:
        """Check what a request is about to run on, where nobody has; else it costs one look."""
        if lease.digest not in self._checked:
            self._check(lease.name, lease.digest, again=False)

    # --- inside ---------------------------------------------------------------------------------

    def _check(self, name: str, digest: str, *, again: bool) -> None:
        with self._lock:
            before = self._digests()
            # A name that has gone on to another content is checked for that one.
            if before.get(name) != digest or (digest in self._checked and not again):
                return
            try:
                self.latest = found = self._compare(name)
            except AdapterNotFoundError:
                # It was unloaded meanwhile: nothing runs by its routes.
                return
            except (RuntimeError, MemoryError):
                logger.exception("the routes of adapter '%s' could not be checked", name)
                # What failed so would fail at every request.
                self._checked |= {digest}
                return
            self._remember(found, before)
        _tell(found)

    def _compare(self, name: str) -> Readiness:
        check = partial(check_numerics, self._served, adapters=[name])
        found = check()
        if not found.unchecked:
            return found
        try:
            return self._between(check).result()
        except (EngineStoppedError, CancelledError):
            # The server ends, so that nothing will run by these routes.
            return found

    def _digests(self) -> dict[str, str]:
        return {info.name: info.digest for info in self._served.adapters.list() if info.digest}

    def _remember(self, found: Readiness, before: dict[str, str]) -> None:
        """Contents that were compared; those that no name points at any more are forgotten."""
        now = self._digests()
        compared = {now[n] for n in found.adapters if n in now and before.get(n) == now[n]}
        self._checked = (self._checked & frozenset(now.values())) | compared


def _tell(found: Readiness) -> None:
    for unchecked in found.unchecked:
        logger.warning("a route was not checked: %s", unchecked)
