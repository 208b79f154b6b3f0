"""From a source to a local folder that `read_adapter` can read, for as long as it is needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import AdapterSourceError
from .archive import unpack
from .hub import fetch_repository
from .limits import Budget, SourceLimits
from .local import check_sizes, copy_folder, is_restricted, not_found, open_local
from .remote import fetch_url
from .source import AdapterSource, HubSource, LocalSource, UrlSource


@contextmanager
def fetch(source: AdapterSource, limits: SourceLimits | None = None) -> Iterator[Path]:
    """Yield a local folder with the files of one adapter.

    A local folder that nothing restricts is yielded as it is, a repository of the hub as it lies
    in the hub's cache.  Everything else (archives, URLs, folders below allowed roots) is copied
    to a private folder first, which is removed afterwards.

    Args:
        source: from `AdapterSource.parse`.
        limits: what is allowed, and how large; None for `SourceLimits()`.

    Raises:
        AdapterNotFoundError: nothing lies there.
        AdapterSourceError: it is not allowed, cannot be reached, or exceeds a limit.
        AdapterFormatError: an archive that is damaged or hostile, or a file that is no file.
    """
    limits = limits or SourceLimits()
    limits.check_allowed(source)
    if isinstance(source, HubSource):
        yield fetch_repository(source, limits)
        return
    if isinstance(source, LocalSource) and _serves_as_it_is(source, limits):
        check_sizes(source, limits)
        yield Path(source.path)
        return
    with ExitStack() as stack:
        with _readable(source):
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="branchline-"))
            folder = _filled(source, Path(made), limits)
        yield folder


def _filled(source: AdapterSource, target: Path, limits: SourceLimits) -> Path:
    if isinstance(source, UrlSource):
        return fetch_url(source, target, limits)
    assert isinstance(source, LocalSource)
    if os.path.isdir(source.path):
        copy_folder(source, target, limits)
        return target
    try:
        file = open_local(source, source.path, limits)
    except FileNotFoundError as error:
        raise not_found(source) from error
    with file:
        Budget(source, limits).take(os.fstat(file.fileno()).st_size)
        return unpack(file, target, source, limits)


def _serves_as_it_is(source: LocalSource, limits: SourceLimits) -> bool:
    return not is_restricted(source, limits) and os.path.isdir(source.path)


@contextmanager
def _readable(source: AdapterSource) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AdapterSourceError(
            f"adapter {source.label!r}", f"cannot be copied ({error.strerror})", "check the source"
        ) from error


@dataclass(frozen=True)
class SourceReader:
    """`fetch` with its limits, for whoever loads adapters by what somebody wrote.

    Args:
        limits: for every source.
    """

    limits: SourceLimits = field(default_factory=SourceLimits)

    @contextmanager
    def resolve(self, source: str | os.PathLike[str] | AdapterSource) -> Iterator[Path]:
        """As `fetch`, of a source or of its text.

        Raises:
            AdapterNotFoundError, AdapterSourceError, AdapterFormatError: as `fetch` and
                `AdapterSource.parse`.
        """
        with fetch(AdapterSource.parse(source), self.limits) as folder:
            yield folder
