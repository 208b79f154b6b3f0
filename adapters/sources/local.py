"""Opening files of this machine, so that what was checked is what is read.

Where roots restrict, the real path is opened folder by folder from its root, and no link is
followed any more: whatever is put in the place of a part meanwhile is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ...core.errors import AdapterFormatError, AdapterNotFoundError, AdapterSourceError
from ..file_names import CONFIG_NAME, PICKLE_NAME, TEMPLATE_FILES, TENSORS_NAME
from .limits import Budget, SourceLimits
from .source import LocalSource

#: The files of an adapter, by the names PEFT and transformers give them; no other is ever taken.
ADAPTER_FILES = (CONFIG_NAME, TENSORS_NAME, PICKLE_NAME, *TEMPLATE_FILES)


def is_restricted(source: LocalSource, limits: SourceLimits) -> bool:
    """Whether something is out of bounds, so that files must be opened from their root."""
    return limits.allowed_roots is not None or source.root is not None


def open_local(source: LocalSource, path: str, limits: SourceLimits) -> BinaryIO:
    """Open a regular file inside of the allowed roots.

    Args:
        source: what errors are about.
        path: the file; links that stay inside are followed.
        limits: the allowed roots.

    Raises:
        FileNotFoundError: there is none.
        AdapterSourceError: it lies outside, or was replaced meanwhile.
        AdapterFormatError: it is no regular file, or cannot be opened.
    """
    real = os.path.realpath(path)
    root = limits.local_root(source, real)
    # Without O_NONBLOCK a pipe in place of the file would block here for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        number = os.open(real, flags) if root is None else _open_below(root, real, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise AdapterSourceError(
                f"adapter {source.label!r}",
                f"{os.path.basename(path)} was replaced while it was opened",
                "try again",
            ) from error
        raise _unusable(source, path, f"cannot be opened ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise _unusable(source, path, "is no regular file")
    return os.fdopen(number, "rb")


def _open_below(root: str, real: str, flags: int) -> int:
    parts = os.path.relpath(real, root).split(os.sep)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(
                part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder
            )
            os.close(folder)
            folder = below
        return os.open(parts[-1], flags | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def check_sizes(source: LocalSource, limits: SourceLimits) -> None:
    """Refuse a folder whose files are larger than the limit; missing ones are the reader's affair.

    Raises:
        AdapterSourceError: they are.
    """
    budget = Budget(source, limits)
    for name in _names_there(source.path):
        try:
            budget.take(os.stat(os.path.join(source.path, name)).st_size)
        except OSError:
            # Whatever is wrong with the file, reading it says so.
            continue


def copy_folder(source: LocalSource, target: Path, limits: SourceLimits) -> None:
    """Copy an adapter's files, each from the very file that was checked.

    Raises:
        AdapterSourceError: one lies outside of the roots, or they are larger than the limit.
        AdapterFormatError: one is no regular file, or cannot be read.
    """
    budget = Budget(source, limits)
    for name in _names_there(source.path):
        try:
            file = open_local(source, os.path.join(source.path, name), limits)
        except FileNotFoundError:
            continue
        with file:
            budget.copy(file, target / name)


def _names_there(folder: str) -> list[str]:
    there = [n for n in ADAPTER_FILES if os.path.lexists(os.path.join(folder, n))]
    # A pickle beside the tensors is never read.
    return [name for name in there if name != PICKLE_NAME or TENSORS_NAME not in there]


def not_found(source: LocalSource) -> AdapterNotFoundError:
    """The error for a path where nothing lies."""
    return AdapterNotFoundError(
        f"adapter {source.label!r}",
        "there is no such folder, and no archive",
        "check the path; for a repository of the hub write hf://owner/name",
    )


def _unusable(source: LocalSource, path: str, state: str) -> AdapterFormatError:
    name = os.path.basename(path)
    remedy = "restore the file from where the adapter was saved"
    return AdapterFormatError(f"adapter {source.label!r}", f"{name} {state}", remedy)
