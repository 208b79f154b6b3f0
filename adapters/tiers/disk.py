"""Reading adapters from their sources: for the first time, and again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ...core.errors import AdapterBrokenError, AdapterError
from ..sources import AdapterSource
from ..weights import AdapterWeights


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
            AdapterError: whatever is wrong with the source or its content.
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
            AdapterBrokenError: all of them are gone or damaged, or hold something else by now.
        """
        failed: list[str] = []
        cause: AdapterError | None = None
        for source in sources:
            try:
                weights = self.read(source)
            except AdapterError as error:
                failed.append(f"{source.label} {error.reason}")
                cause = error
                continue
            if weights.digest == digest:
                return weights
            failed.append(f"{source.label} has changed (digest {weights.digest[:12]}...)")
        raise AdapterBrokenError(
            f"adapter '{name}'",
            f"has left memory and cannot come back: {'; '.join(failed)}; expected "
            f"digest {digest[:12]}...",
            "restore its source, reload it with what lies there now, or unload it",
        ) from cause
