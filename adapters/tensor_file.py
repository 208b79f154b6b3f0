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
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..core.errors import AdapterFormatError

# The library's own limit; a longer header is an attack or damage.
_LONGEST_HEADER = 100_000_000

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

    Raises:
        AdapterFormatError: on entry, if it cannot be read or is no well-formed safetensors file.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self._subject = subject
        self._name = path.name
        with ExitStack() as stack:
            self._file = stack.enter_context(open_regular(path, subject))
            self.nbytes = size = os.fstat(self._file.fileno()).st_size
            self._data_begin, entries = self._read_header(size)
            self._headers, self._spans = self._layout(entries, size - self._data_begin)
            stack.pop_all()  # well-formed: `__exit__` closes it

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def headers(self) -> list[TensorHeader]:
        """Name, dtype and shape of every tensor, in the order of the header."""
        return list(self._headers.values())

    def read(self, name: str) -> torch.Tensor:
        """Read one float32, float16 or bfloat16 tensor; it owns its memory.

        Raises:
            AdapterFormatError: the file has become shorter since it was opened.
        """
        header, span = self._headers[name], self._spans[name]
        if span.end == span.begin:
            return torch.empty(header.shape, dtype=_DTYPES[header.dtype])
        buffer = bytearray(span.end - span.begin)
        self._file.seek(self._data_begin + span.begin)
        read_exactly(self._file, buffer, f"tensor {name!r}", self._subject)
        return torch.frombuffer(buffer, dtype=_DTYPES[header.dtype]).reshape(header.shape)

    def _read_header(self, size: int) -> tuple[int, dict[str, Any]]:
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
        try:
            entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"has a broken header ({error})") from error
        if not isinstance(entries, dict):
            raise self._bad("has a header that is no JSON object")
        entries.pop("__metadata__", None)
        return 8 + length, entries

    def _layout(
        self, entries: Mapping[str, Any], size: int
    ) -> tuple[dict[str, TensorHeader], dict[str, _Span]]:
        headers, spans = {}, {}
        for name, entry in entries.items():
            headers[name], spans[name] = self._entry(name, entry)
        # Every byte of the data belongs to exactly one tensor.
        position = 0
        for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
            if span.begin != position:
                raise self._bad(f"has a gap or an overlap before tensor {name!r}")
            position = span.end
        if position != size:
            state = "is truncated" if position > size else "is longer than its tensors"
            raise self._bad(f"{state}: {size} bytes of data, {position} in the header")
        return headers, spans

    def _entry(self, name: str, entry: Any) -> tuple[TensorHeader, _Span]:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._bad(f"has a broken header entry for {name!r}") from error
        sizes = [*shape, begin, end] if isinstance(shape, list) else [None]
        if not all(type(number) is int and number >= 0 for number in sizes):
            raise self._bad(f"has a broken header entry for {name!r}")
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise self._bad(f"has tensor {name!r} of the unknown dtype {dtype!r}")
        if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
            raise self._bad(f"has tensor {name!r} whose shape and bytes do not agree")
        return TensorHeader(name, dtype, tuple(shape)), _Span(begin, end)

    def _bad(self, state: str) -> AdapterFormatError:
        return AdapterFormatError(
            self._subject, f"{self._name} {state}", "save or copy the adapter again"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result
