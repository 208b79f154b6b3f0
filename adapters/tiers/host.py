"""Host memory: the copies that slots are filled from."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...core.errors import AdapterCapacityError
from ..version import Version
from ..weights import AdapterWeights
from .eviction import EvictionQueue
from .limits import TierLimits


class HostTier:
    """Which versions have a copy in host memory; called under the store's lock.

    A copy may go whose version can come back from a source, is not pinned and serves no batch.
    Those that may not go count all the same; while they take all the room, others pass through.

    Args:
        limits: of the tier.
    """

    def __init__(self, limits: TierLimits) -> None:
        self._limits = limits
        self._queue: EvictionQueue[Version] = EvictionQueue(limits.eviction)
        self._queued_bytes = 0
        self.count = 0
        #: Copies that were let go to keep the limits, so far.
        self.evictions = 0
        self.nbytes = 0

    @property
    def is_over(self) -> bool:
        """Whether more is kept than the limits say."""
        return self._exceeds(self.count, self.nbytes)

    def check_can_keep(self, version: Version) -> None:
        """Refuse to keep a version for good where others that have to stay leave no room.

        One that lies in a slot alone needs none: it stays there.

        Raises:
            AdapterCapacityError: they do.
        """
        count, nbytes = self.count - len(self._queue), self.nbytes - self._queued_bytes
        if version.weights is None or (version.names and version not in self._queue):
            return
        if self._exceeds(count + 1, nbytes + version.nbytes):
            raise AdapterCapacityError(
                f"adapter of {version.nbytes} bytes",
                f"would have to stay in host memory, where {count} adapters of {nbytes} bytes have "
                "to stay already (pinned, or without a source)",
                "unpin or unload some, or raise max_cpu_loras or max_cpu_lora_bytes "
                "(command line: --max-cpu-loras, --max-cpu-lora-bytes)",
            )

    def put(self, version: Version, weights: AdapterWeights) -> None:
        """Keep a copy."""
        version.weights = weights
        self.count += 1
        self.nbytes += version.nbytes
        self.follow(version)

    def remove(self, version: Version) -> None:
        """Drop the copy, if there is one."""
        if version.weights is None:
            return
        self._dequeue(version)
        version.weights = None
        self.count -= 1
        self.nbytes -= version.nbytes

    def follow(self, version: Version) -> None:
        """Whether the copy may go has changed, or its priority."""
        self._dequeue(version)
        if version.weights is not None and version.sources and not version.pinned:
            self._queue.add(version)
            self._queued_bytes += version.nbytes

    def trim(self) -> None:
        """Drop copies until the limits are kept, or nothing more may go."""
        while self.is_over:
            victim = self._queue.first(lambda version: not version.in_use)
            if victim is None:
                return
            self.remove(victim)
            self.evictions += 1

    def _dequeue(self, version: Version) -> None:
        if version in self._queue:
            self._queue.discard(version)
            self._queued_bytes -= version.nbytes

    def _exceeds(self, count: int, nbytes: int) -> bool:
        adapters, size = self._limits.max_cpu_loras, self._limits.max_cpu_lora_bytes
        return (adapters is not None and count > adapters) or (size is not None and nbytes > size)


def page_locked(weights: AdapterWeights) -> AdapterWeights:
    """A copy whose tensors lie in page-locked memory, which a CUDA device reads by itself."""
    return _page_locked(weights)


def _page_locked(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, MappingProxyType | dict):
        return MappingProxyType({name: _page_locked(part) for name, part in value.items()})
    if isinstance(value, tuple):
        return tuple(_page_locked(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {item.name: _page_locked(getattr(value, item.name)) for item in fields(value)}
        return replace(value, **changed)
    return value
