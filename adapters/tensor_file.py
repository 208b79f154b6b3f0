"""A safetensors file, opened once: its header first, its tensors only when asked for.

The header that was checked is the one the tensors are read by, through the same open file. A file
that is replaced in between cannot slip in another layout. (The library's own reader takes a path
and would open it again.)
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from ..core.errors import AdapterFormatError

# The library's own limit; a longer header is an attack or damage.
_LONGEST_HEADER = 100_000_000
# Longer ones are read anew for every file.
_LONGEST_KEPT = 2**20
# Of one call of the system.
_MOST_BUFFERS = 1024

_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class TensorHeader:
    """What a file says about a tensor before its bytes.

    Args:
        name: the name in the file.
        dtype: safetensors' name of the dtype ("F32", "BF16", "F8_E4M3").
        shape: the sizes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Span:
    begin: int
    end: int


@dataclass(frozen=True)
class _Layout:
    """What a header says; files of one shape share it.

    Args:
        headers: by the name of the tensor, in the order of the header.
        spans: by the name, within the data.
        size: of the data.
    """

    headers: Mapping[str, TensorHeader]
    spans: Mapping[str, _Span]
    size: int


class _BadHeaderError(Exception):
    """What is wrong with a header."""


def open_regular(path: Path, subject: str) -> BufferedReader:
    """Open a file that must be a regular one; links are followed.

    Raises:
        AdapterFormatError: it is missing, a dangling link, a folder, a pipe, or unreadable.
    """
    remedy = "restore the file from where the adapter was saved"
    try:
        # Without O_NONBLOCK a pipe in place of the file would block here for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        state = "is a dangling link" if path.is_symlink() else "is missing"
        raise AdapterFormatError(subject, f"{path.name} {state}", remedy) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = f"{path.name} cannot be read ({error})"
        raise AdapterFormatError(subject, reason, remedy) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterFormatError(subject, f"{path.name} is no regular file", remedy)
    return os.fdopen(descriptor, "rb")


def read_exactly(file: BufferedReader, buffer: bytearray, what: str, subject: str) -> None:
    """Fill a buffer from a file.

    Raises:
        AdapterFormatError: the file ends early or reading fails.
    """
    remedy = "copy the adapter again"
    try:
        count = file.readinto(buffer)
    except OSError as error:
        raise AdapterFormatError(subject, f"{what} cannot be read ({error})", remedy) from error
    if count != len(buffer):
        raise AdapterFormatError(
            subject, f"{what} is truncated: {count} of {len(buffer)} bytes", remedy
        )


class TensorFile:
    """A context manager over one safetensors file.

    Args:
        path: the file.
        subject: what errors are about ("adapter '/path'").

    Attributes:
        nbytes: size of the file.
        header: its bytes; equal ones say the same of all tensors.

    Raises:
        AdapterFormatError: on entry, if it cannot be read or is no well-formed safetensors file.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self._subject = subject
        self._name = path.name
        with ExitStack() as stack:
            self._file = stack.enter_context(open_regular(path, subject))
            self.nbytes = size = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header(size)
            self._data_begin = 8 + len(self.header)
            layout = self._checked_layout(size - self._data_begin)
            self._headers, self._spans = layout.headers, layout.spans
            stack.pop_all()  # well-formed: `__exit__` closes it

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    @property
    def headers(self) -> list[TensorHeader]:
        """Name, dtype and shape of every tensor, in the order of the header."""
        return list(self._headers.values())

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read float32, float16 or bfloat16 tensors, by their names; each owns its memory.

        Those that lie one after the other are read in one call of the system.

        Raises:
            AdapterFormatError: the file has become shorter since it was opened, or cannot be read.
        """
        found: dict[str, torch.Tensor] = {}
        run: list[str] = []
        for name in sorted(set(names), key=lambda name: self._spans[name].begin):
            apart = run and self._spans[run[-1]].end != self._spans[name].begin
            if apart or len(run) == _MOST_BUFFERS:
                found |= self._read_run(run)
                run = []
            run.append(name)
        return found | self._read_run(run)

    def _read_run(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read tensors that lie one after the other."""
        if not names:
            return {}
        spans = [self._spans[name] for name in names]
        buffers = [bytearray(span.end - span.begin) for span in spans]
        try:
            count = os.preadv(self._file.fileno(), buffers, self._data_begin + spans[0].begin)
        except OSError as error:
            reason = f"{self._name} cannot be read ({error})"
            raise AdapterFormatError(self._subject, reason, "copy the adapter again") from error
        if count != spans[-1].end - spans[0].begin:
            # The system hands out 2 GiB at most at a time.
            for name, span, buffer in zip(names, spans, buffers, strict=True):
                self._file.seek(self._data_begin + span.begin)
                read_exactly(self._file, buffer, f"tensor {name!r}", self._subject)
        return {
            name: self._tensor(self._headers[name], buffer)
            for name, buffer in zip(names, buffers, strict=True)
        }

    def _tensor(self, header: TensorHeader, buffer: bytearray) -> torch.Tensor:
        dtype = _DTYPES[header.dtype]
        if not buffer:
            return torch.empty(header.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype).reshape(header.shape)

    def _read_header(self, size: int) -> bytes:
        if size < 8:
            raise self._bad("is empty" if size == 0 else f"is truncated: {size} bytes")
        prefix = bytearray(8)
        read_exactly(self._file, prefix, self._name, self._subject)
        length = int.from_bytes(prefix, "little")
        if length > min(_LONGEST_HEADER, size - 8):
            raise self._bad(
                f"is truncated or no safetensors file: a header of {length} bytes in {size}"
            )
        text = bytearray(length)
        read_exactly(self._file, text, self._name, self._subject)
        return bytes(text)

    def _checked_layout(self, size: int) -> _Layout:
        # Adapters of one shape have one header; an endless one would fill the memory.
        find = _known_layout if len(self.header) <= _LONGEST_KEPT else _find_layout
        try:
            layout = find(self.header)
        except _BadHeaderError as error:
            raise self._bad(str(error)) from error.__cause__
        if layout.size != size:
            state = "is truncated" if layout.size > size else "is longer than its tensors"
            raise self._bad(f"{state}: {size} bytes of data, {layout.size} in the header")
        return layout

    def _bad(self, state: str) -> AdapterFormatError:
        return AdapterFormatError(
            self._subject, f"{self._name} {state}", "save or copy the adapter again"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _find_layout(header: bytes) -> _Layout:
    """What a header says.

    Raises:
        _BadHeaderError: it is no well-formed one.
    """
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _BadHeaderError(f"has a broken header ({error})") from error
    if not isinstance(entries, dict):
        raise _BadHeaderError("has a header that is no JSON object")
    entries.pop("__metadata__", None)
    headers, spans = {}, {}
    for name, entry in entries.items():
        headers[name], spans[name] = _entry(name, entry)
    # Every byte of the data belongs to exactly one tensor.
    position = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin != position:
            raise _BadHeaderError(f"has a gap or an overlap before tensor {name!r}")
        position = span.end
    return _Layout(headers, spans, position)


_known_layout = lru_cache(maxsize=64)(_find_layout)


def _entry(name: str, entry: Any) -> tuple[TensorHeader, _Span]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _BadHeaderError(f"has a broken header entry for {name!r}") from error
    sizes = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(number) is int and number >= 0 for number in sizes):
        raise _BadHeaderError(f"has a broken header entry for {name!r}")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _BadHeaderError(f"has tensor {name!r} of the unknown dtype {dtype!r}")
    if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        raise _BadHeaderError(f"has tensor {name!r} whose shape and bytes do not agree")
    return TensorHeader(name, dtype, tuple(shape)), _Span(begin, end)
