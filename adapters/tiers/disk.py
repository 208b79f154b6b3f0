"""Reading adapters from their sources: for the first time, and again."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ...core.errors import AdapterBrokenError, AdapterError, AdapterSourceError
from ..sources import AdapterSource, LocalSource
from ..weights import AdapterWeights

# What says nothing of the adapter: too much is open, memory or disk is full, a disk or a network
# does not answer.
_PASSING = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.EDQUOT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EINTR, errno.EIO, errno.EMFILE,
    errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.ENFILE, errno.ENOBUFS,
    errno.ENOMEM, errno.ENOSPC, errno.ENOTCONN, errno.EPIPE, errno.EREMOTEIO, errno.ESTALE,
    errno.ETIMEDOUT,
})  # fmt: skip


def is_passing(error: AdapterError, source: AdapterSource) -> bool:
    """Whether reading failed for a reason that may be gone at the next try.

    Args:
        error: with the error that led to it as its cause.
        source: what was read.  Of a remote one all passes but that nothing lies there, that it is
            not allowed, or that what came is damaged.
    """
    if not isinstance(source, LocalSource) and isinstance(error, AdapterSourceError):
        return error.__cause__ is not None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError | ConnectionError):
            return True
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return True
        cause = cause.__cause__
    return False


def not_now(name: str, reason: str) -> AdapterSourceError:
    """What a request is told that met a failure of this kind."""
    return AdapterSourceError(
        f"adapter '{name}'",
        f"cannot be read at the moment: {reason}",
        "try again; nothing has changed, and the next use reads it anew",
    )


@contextmanager
def passing_told(name: str, source: AdapterSource) -> Iterator[None]:
    """Tell a failure that may pass from one that will not.

    Raises:
        AdapterSourceError: it may; see `is_passing`.
    """
    try:
        yield
    except AdapterError as error:
        if is_passing(error, source):
            raise not_now(name, f"{error.subject} {error.reason}") from error
        raise


class SourceFolders(Protocol):
    """Gives the files of a source as a local folder; `sources.SourceReader` is one."""

    def resolve(self, source: AdapterSource) -> AbstractContextManager[Path]:
        """A folder that is there until the context ends."""
        ...


class DiskTier:
    """What is in no memory, and how it comes back.

    Args:
        folders: makes local folders of sources.
        read: reads and checks a local folder.
    """

    def __init__(self, folders: SourceFolders, read: Callable[[Path], AdapterWeights]) -> None:
        self._folders = folders
        self._read = read

    def read(self, source: AdapterSource) -> AdapterWeights:
        """The adapter that lies at `source`, checked against the base model.

        Raises:
            AdapterError: whatever is wrong with the source or its content; see `is_passing`.
        """
        with self._folders.resolve(source) as folder:
            return replace(self._read(folder), source=source.label)

    def read_again(
        self, name: str, digest: str, sources: tuple[AdapterSource, ...]
    ) -> AdapterWeights:
        """The same content as before, from the first of `sources` that still has it.

        Args:
            name: for messages.
            digest: of the content.
            sources: where it was read, or found to be the same, before; at least one.

        Raises:
            AdapterSourceError: one of them may give it at the next try; see `is_passing`.
            AdapterBrokenError: all of them are gone or damaged, or hold something else by now.
        """
        failed: list[str] = []
        cause: AdapterError | None = None
        passing: AdapterError | None = None
        for source in sources:
            try:
                weights = self.read(source)
            except AdapterError as error:
                failed.append(f"{source.label} {error.reason}")
                cause = error
                passing = error if is_passing(error, source) else passing
                continue
            if weights.digest == digest:
                return weights
            failed.append(f"{source.label} has changed (digest {weights.digest[:12]}...)")
        if passing is not None:
            raise not_now(name, "; ".join(failed)) from passing
        raise AdapterBrokenError(
            f"adapter '{name}'",
            f"has left memory and cannot come back: {'; '.join(failed)}; expected "
            f"digest {digest[:12]}...",
            "restore its source, reload it with what lies there now, or unload it",
        ) from cause
