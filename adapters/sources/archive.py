"""Taking an adapter's files out of a zip or tar archive that nobody vouches for.

Every name, type and size in it is checked; links, devices, absolute names and ".." are refused
wherever they stand, not only in the files that are taken.  A tar archive is read once, from its
front to its end, so that neither its length nor a header's can be more than what is allowed here.
"""

from __future__ import annotations

import gzip
import io
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ...core.errors import AdapterFormatError, AdapterSourceError, BranchlineError
from ..file_names import CONFIG_NAME
from .limits import Budget, SourceLimits
from .local import ADAPTER_FILES
from .source import AdapterSource

# A thousand entries with long names; more is no adapter's directory.
_LONGEST_DIRECTORY = 2**20
# For the headers of one tar member, extended ones included, and what is read ahead.
_LONGEST_HEADERS = 2**18
# Padding after the last member.
_LONGEST_TAIL = 2**22
# Below this a file may be packed as well as it will: zeros pack a thousandfold.
_ALWAYS_EXPANDED = 32 * 2**20
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DRIVE = re.compile(r"[A-Za-z]:")
_BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, ValueError,
    NotImplementedError, OverflowError,
)  # fmt: skip


def unpack(file: BinaryIO, target: Path, source: AdapterSource, limits: SourceLimits) -> Path:
    """Write the adapter's files of an archive below `target`.

    Args:
        file: the archive, at its start; seekable.
        target: an empty folder.
        source: what errors are about.
        limits: of sizes and counts.

    Returns:
        the folder that holds them: `target`, or one below it.

    Raises:
        AdapterFormatError: it is no zip, tar or tar.gz, is damaged, holds what no adapter's
            archive holds (a link, a device, an absolute name, ".."), or not exactly one adapter.
        AdapterSourceError: it exceeds a limit.
    """
    subject = f"adapter {source.label!r}"
    budget = Budget(source, limits)
    start = file.read(512)
    file.seek(0)
    with _broken_archives(subject):
        if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            return _unzip(file, target, subject, limits, budget)
        if start.startswith(b"\x1f\x8b"):
            unpacked = gzip.GzipFile(fileobj=file, mode="rb")
            return _untar(unpacked, file, target, subject, limits, budget)
        if start[257:262] == b"ustar":
            return _untar(file, file, target, subject, limits, budget)
    raise AdapterFormatError(
        subject, "is neither a folder nor a zip, tar or tar.gz archive", "pack it as one of these"
    )


@contextmanager
def _broken_archives(subject: str) -> Iterator[None]:
    try:
        yield
    except BranchlineError:
        # Ours, some of which are value errors too.
        raise
    except _BROKEN as error:
        reason = f"the archive is damaged ({type(error).__name__}: {str(error)!a})"
        raise AdapterFormatError(subject, reason, "pack or copy it again") from error


class _Members:
    """The names of an archive as they come by, and which of its folders holds the adapter."""

    def __init__(self, subject: str, limits: SourceLimits) -> None:
        self._subject = subject
        self._limits = limits
        self._count = 0
        self._taken: dict[tuple[str, str], str] = {}

    def take(self, name: str, kind: str, size: int) -> tuple[str, str] | None:
        """Check a member; (folder, file) if it is one of an adapter's files, else None.

        Args:
            name: as the archive has it.
            kind: "file", "folder", or what it is instead.
            size: of its contents.
        """
        self._count += 1
        if self._count > self._limits.max_members:
            raise AdapterSourceError(
                self._subject,
                f"the archive has more than {self._limits.max_members} members (max_members)",
                "pack the adapter's files alone",
            )
        if kind not in ("file", "folder"):
            raise self._hostile(name, f"is {kind}")
        if size < 0:
            raise self._hostile(name, "has a negative size")
        parts = self._parts(name)
        if kind == "folder" or len(parts) not in (1, 2) or parts[-1] not in ADAPTER_FILES:
            return None
        key = (parts[0] if len(parts) == 2 else "", parts[-1])
        if key in self._taken:
            raise self._hostile(name, f"is there twice (as {self._taken[key]!a} too)")
        self._taken[key] = name
        return key

    def folder(self) -> str:
        """The one folder with an adapter; "" for the archive's root."""
        folders = [folder for folder, file in self._taken if file == CONFIG_NAME]
        if "" in folders:
            return ""
        if len(folders) == 1:
            return folders[0]
        found = ", ".join(map(ascii, sorted(folders)[:10])) or f"no {CONFIG_NAME}"
        raise AdapterFormatError(
            self._subject,
            f"holds not one adapter in its root or one folder down, but {found}",
            "pack one adapter's folder",
        )

    def _parts(self, name: str) -> list[str]:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise self._hostile(name, "has a name that is no UTF-8") from None
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or "\\" in name or "\0" in name or _DRIVE.match(name):
            raise self._hostile(name, "has a name that is absolute or no portable path")
        if ".." in parts:
            raise self._hostile(name, "leads out of the archive")
        return parts

    def _hostile(self, name: str, what: str) -> AdapterFormatError:
        return AdapterFormatError(
            self._subject, f"archive member {name!a} {what}", "pack the adapter's files alone"
        )


def _unzip(
    file: BinaryIO, target: Path, subject: str, limits: SourceLimits, budget: Budget
) -> Path:
    metered: Any = _Metered(file, subject)
    metered.allow(_LONGEST_DIRECTORY)
    # The directory's length stands in the file; it must not be believed before it is read.
    with zipfile.ZipFile(metered) as archive:
        metered.allow(None)
        members = _Members(subject, limits)
        wanted = {}
        for info in archive.infolist():
            key = members.take(info.filename, _zip_kind(info), info.file_size)
            if key is not None:
                wanted[key] = info
        folder = members.folder()
        for (parent, name), info in wanted.items():
            if parent == folder:
                packed = partial(getattr, info, "compress_size")
                with archive.open(info) as member:
                    reader: Any = _Expanding(member, packed, subject, limits)
                    budget.copy(reader, target / name)
    return target


def _zip_kind(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 0x41:
        return "encrypted"
    if info.compress_type not in _PACKED:
        return f"packed by method {info.compress_type}, which is not served"
    kind = stat.S_IFMT(info.external_attr >> 16)
    if info.is_dir() and kind in (0, stat.S_IFDIR):
        return "folder"
    if kind in (0, stat.S_IFREG):
        return "file"
    return "a link" if kind == stat.S_IFLNK else "no regular file"


def _untar(
    tar: Any, packed: BinaryIO, target: Path, subject: str, limits: SourceLimits, budget: Budget
) -> Path:
    metered: Any = _Metered(_Expanding(tar, packed.tell, subject, limits), subject)
    metered.allow(_LONGEST_HEADERS)
    members, passed = _Members(subject, limits), budget.fresh()
    stages: dict[str, Path] = {}
    with tarfile.open(fileobj=metered, mode="r|") as archive:
        while (member := archive.next()) is not None:
            key = members.take(member.name, _tar_kind(member), member.size)
            # What is not taken is read past, and so is as much work.
            passed.take(member.size)
            metered.allow(member.size + _LONGEST_HEADERS)
            reader: Any = None if key is None else archive.extractfile(member)
            if key is None or reader is None:
                continue
            # No name of the archive's becomes one of a folder here.
            stage = stages.setdefault(key[0], target / str(len(stages)))
            stage.mkdir(exist_ok=True)
            budget.copy(reader, stage / key[1])
    # The checksum stands at the very end.
    metered.allow(_LONGEST_TAIL)
    while metered.read(2**16):
        pass
    return stages[members.folder()]


def _tar_kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "a link"
    if member.issparse():
        return "a sparse file"
    if member.isreg():
        return "file"
    return "folder" if member.isdir() else "no regular file"


class _Metered:
    """A file of which only so many bytes may be read at a time.

    Args:
        file: what is read.
        subject: what errors are about.
    """

    def __init__(self, file: Any, subject: str) -> None:
        self._file = file
        self._subject = subject
        self._left: int | None = 0

    def allow(self, count: int | None) -> None:
        """From now on `count` bytes may be read; None for any number."""
        self._left = count

    def read(self, size: int = -1) -> bytes:
        """As of any file.

        Raises:
            AdapterFormatError: more is asked for than is allowed, and is there.
        """
        if self._left is None:
            return self._file.read(size)
        # One more than allowed shows that it is there, and is no more memory.
        wanted = self._left + 1 if size < 0 else min(size, self._left + 1)
        data = self._file.read(wanted)
        self._left -= len(data)
        if self._left < 0:
            raise AdapterFormatError(
                self._subject,
                "the archive has a directory, headers or a tail longer than any adapter's",
                "pack the adapter's files alone",
            )
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As of any file."""
        return self._file.tell()

    def seekable(self) -> bool:
        """True."""
        return True


class _Expanding:
    """A reader of unpacked bytes that must not become too many for the packed ones.

    Args:
        reader: gives the unpacked bytes.
        packed: how many packed bytes they came from, up to now or in all.
        subject: what errors are about.
        limits: `max_expansion` counts.
    """

    def __init__(
        self, reader: Any, packed: Callable[[], int], subject: str, limits: SourceLimits
    ) -> None:
        self._reader = reader
        self._packed = packed
        self._subject = subject
        self._most = limits.max_expansion
        self._out = 0

    def read(self, size: int = -1) -> bytes:
        """As of any file.

        Raises:
            AdapterSourceError: the bytes are too many.
        """
        data = self._reader.read(size)
        self._out += len(data)
        if self._out > max(_ALWAYS_EXPANDED, self._packed() * self._most):
            raise AdapterSourceError(
                self._subject,
                f"the archive unpacks to more than {self._most} times its size (max_expansion)",
                "pack the adapter's files alone, or raise max_expansion",
            )
        return data
