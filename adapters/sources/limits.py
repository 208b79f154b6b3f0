"""What a source may be, and how large: allowed roots and size limits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from ...core.errors import AdapterSourceError, ConfigError
from .source import AdapterSource, HubSource, LocalSource

_CHUNK = 2**20


@dataclass(frozen=True)
class SourceLimits:
    """What is fetched, and what is refused.

    Args:
        allowed_roots: folders (`/srv/adapters`) and URLs (`s3://bucket/adapters`, `hf://owner`)
            that a source must lie in, links resolved; None allows every source.
        max_adapter_bytes: of the files of one adapter together, unpacked; also of an archive.
        max_members: of an archive.
        max_expansion: how many times larger than packed a file may become.

    Raises:
        ConfigError: a limit below 1, or a root that is no path and no URL.
    """

    allowed_roots: tuple[str, ...] | None = None
    max_adapter_bytes: int = 16 * 2**30
    max_members: int = 1_000
    max_expansion: int = 200

    def __post_init__(self) -> None:
        for name in ("max_adapter_bytes", "max_members", "max_expansion"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}", "is below 1", "raise it")
        for root in self.allowed_roots or ():
            _place_of_root(root)

    def check_allowed(self, source: AdapterSource) -> None:
        """Refuse a source outside of the allowed roots, whether anything lies there or not.

        Raises:
            AdapterSourceError: it lies in none of them.
        """
        if isinstance(source, LocalSource):
            self.local_root(source, source.place)
        elif self.allowed_roots is not None:
            places = (_place_of_root(root) for root in self.allowed_roots)
            if not any(lies_in(source.place, place) for place in places):
                raise outside(source)

    def local_root(self, source: LocalSource, real: str) -> str | None:
        """The allowed folder that the real path `real` of `source` lies in; None if all do.

        Raises:
            AdapterSourceError: it lies in none of them, or not in the source's own root.
        """
        own = None if source.root is None else os.path.realpath(source.root)
        if own is not None and not lies_in(real, own):
            raise outside(source)
        if self.allowed_roots is None:
            return own
        for root in self.allowed_roots:
            place = _place_of_root(root)
            if "://" not in place and lies_in(real, place):
                return place
        raise outside(source)


def outside(source: AdapterSource) -> AdapterSourceError:
    """The error for a source that no root allows."""
    return AdapterSourceError(
        f"adapter {source.label!r}",
        "lies outside of the allowed roots",
        "copy it there, or allow its root with allowed_roots= (command line: --allowed-roots)",
    )


def lies_in(place: str, root: str) -> bool:
    """Whether `place` is `root` or below it, by whole segments."""
    return place == root or place.startswith(root.rstrip("/") + "/")


def _place_of_root(root: str) -> str:
    if root.startswith("hf://") and "/" not in root[5:].rstrip("/") and root[5:].rstrip("/"):
        # An owner alone is a root, but no source.
        return HubSource(f"{root[5:].rstrip('/')}/x").place.removesuffix("/x")
    try:
        return AdapterSource.parse(root).place.rstrip("/") or "/"
    except AdapterSourceError as error:
        raise ConfigError(f"allowed root {root!r}", error.reason, error.remedy) from error


class Budget:
    """Bytes that may still be written for one adapter.

    Args:
        source: of the adapter.
        limits: `max_adapter_bytes` counts.
    """

    def __init__(self, source: AdapterSource, limits: SourceLimits) -> None:
        self._source = source
        self._limits = limits
        self._limit = limits.max_adapter_bytes
        self._used = 0

    def fresh(self) -> Budget:
        """Another one, of which nothing is used."""
        return Budget(self._source, self._limits)

    def take(self, count: int) -> None:
        """Count `count` bytes.

        Raises:
            AdapterSourceError: they are more than the limit leaves.
        """
        self._used += count
        if self._used > self._limit:
            raise AdapterSourceError(
                f"adapter {self._source.label!r}",
                f"has more than the {self._limit} bytes that max_adapter_bytes allows",
                "if an adapter of this size is meant, raise max_adapter_bytes (command line: "
                "--max-adapter-bytes)",
            )

    def copy(self, reader: BinaryIO, target: str | os.PathLike[str]) -> int:
        """Write what is left in `reader` to a new file, and return how many bytes that was.

        Raises:
            AdapterSourceError: it is more than the limit leaves, or the disk is full.
        """
        total = 0
        with self._writing():
            file = open(target, "xb")  # noqa: SIM115, it is closed below
        with file:
            while chunk := reader.read(_CHUNK):
                self.take(len(chunk))
                total += len(chunk)
                with self._writing():
                    file.write(chunk)
            with self._writing():
                file.flush()
        return total

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What fails here is this machine's disk, not the source."""
        try:
            yield
        except OSError as error:
            raise AdapterSourceError(
                f"adapter {self._source.label!r}",
                f"its copy cannot be written ({error.strerror})",
                f"make room in {tempfile.gettempdir()}, or set TMPDIR",
            ) from error
