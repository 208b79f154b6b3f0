"""Audits for whoever looks often: made anew only when what is planned may have changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...policies.audit import AuditReport
    from ..model import ServedModel

_KEPT = 8


class KeptAudits:
    """Audits of one model, each made once an epoch; any thread.

    What ran is in them as of when they were made: sites have the counters of now.

    Args:
        served: the model.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[object, ...], AuditReport] = OrderedDict()

    def of(self, adapters: tuple[str, ...]) -> AuditReport:
        """The audit for base rows and, where there are any, for a batch of `adapters`.

        Args:
            adapters: names of those that share a batch.

        Raises:
            AdapterNotFoundError: one of them is unknown.
        """
        registry = self._served.registry
        # Held while it is made: those who ask meanwhile want the same one.
        with self._lock:
            key = (registry.epoch, registry.hooks_unseen(), adapters)
            found = self._kept.get(key)
            if found is None:
                sets = [(), adapters] if adapters else [()]
                found = self._kept[key] = self._served.audit(adapter_sets=sets)
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found
