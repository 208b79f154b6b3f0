"""Leases: a content kept for whoever goes on using it, whatever its name points at meanwhile."""

from __future__ import annotations

import weakref

from ..core.errors import BatchError
from .store import VersionStore
from .version import Version


class Lease:
    """The content that a name pointed at when the lease was taken; rows may name the lease.

    A request that takes many steps runs on one content so, though its name is swapped or
    unloaded between them.  It takes no slot between the steps, but stays in host memory.

    Args:
        store: holds the content.
        version: already counted as leased.
        name: by which it was asked for.

    Attributes:
        name: by which it was asked for.
        digest: of the content: the key of whatever is computed with it (I9).
    """

    def __init__(self, store: VersionStore, version: Version, name: str) -> None:
        self.name = name
        self.digest = version.digest
        self._store = store
        self._version = version
        # Whoever forgets a lease must not keep its content for ever.  Garbage is collected in the
        # middle of anything, so that the store is only told; it acts with the next batch.
        self._forgotten = weakref.finalize(self, store.forgotten_leases.append, version)
        self._forgotten.atexit = False

    @property
    def version(self) -> Version:
        """The content, for a batch.

        Raises:
            BatchError: the lease has ended.
        """
        if not self._forgotten.alive:
            raise BatchError(
                f"the lease of adapter '{self.name}'",
                "has ended",
                "take another one, and release it after the last batch that names it",
            )
        return self._version

    def release(self) -> None:
        """End the lease; batches in flight that name it go on."""
        if self._forgotten.detach() is not None:
            self._store.end_lease(self._version)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease({self.name!r}, digest={self.digest[:12]!r})"
