"""JSON metadata as typed fields; whatever is wrong with one is an error with file and field."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import CheckpointError

#: The ignore lists of the largest models come to a few MiB.
LARGEST_FILE = 64 * 2**20
_MEND = "restore the file as the checkpoint's producer wrote it"


@dataclass(frozen=True)
class Document:
    """One JSON object that describes a quantisation.

    Attributes:
        source: file and place, for messages ("config.json: quantization_config").
        fields: its keys and values, unchecked.
    """

    source: str
    fields: Mapping[str, Any]

    def error(self, field: str, reason: str, remedy: str = _MEND) -> CheckpointError:
        """The error of one field, to be raised."""
        return CheckpointError(self.source, f"{field} {reason}", remedy)

    def wrong(self, field: str, expected: str) -> CheckpointError:
        """The error of a field whose value is of the wrong type, to be raised."""
        return self.error(field, f"is {short(self.fields.get(field))}, expected {expected}")

    def text(self, field: str) -> str | None:
        """A string; None where it is absent or null.

        Raises:
            CheckpointError: another type.
        """
        value = self.fields.get(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(field, "a text")
        return value

    def flag(self, field: str) -> bool:
        """A boolean; false where it is absent or null.

        Raises:
            CheckpointError: another type.
        """
        value = self.fields.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return bool(value)

    def positive(self, field: str) -> float | None:
        """A positive finite number; None where it is absent or null.

        Raises:
            CheckpointError: another type or value.
        """
        value = self.fields.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(field, "a number")
        if not 0 < value <= 1e300 or not math.isfinite(value):
            raise self.wrong(field, "a positive finite number")
        return float(value)

    def names(self, field: str) -> tuple[str, ...] | None:
        """A list of strings; None where it is absent or null, which is not an empty list.

        Raises:
            CheckpointError: another type, or an entry that is no string or is empty.
        """
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(field, "a list of names")
        for entry in value:
            if not isinstance(entry, str) or not entry:
                raise self.error(field, f"holds {short(entry)}, expected names")
        return tuple(value)

    def table(self, field: str) -> Document | None:
        """An object; None where it is absent or null.

        Raises:
            CheckpointError: another type.
        """
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return Document(
            f"{self.source}.{field}" if ": " in self.source else f"{self.source}: {field}", value
        )

    def tables(self, field: str) -> dict[str, Document]:
        """An object of objects, in the file's order; empty where it is absent or null.

        Raises:
            CheckpointError: another type, or a member that is no object.
        """
        outer = self.table(field)
        if outer is None:
            return {}
        found = {}
        for name in outer.fields:
            inner = outer.table(name)
            if inner is None:
                raise outer.wrong(name, "an object")
            found[name] = inner
        return found

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Refuse a key outside of `known`, unless it is off.

        Raises:
            CheckpointError: such a key is null, false or empty no more.
        """
        for key in sorted(set(self.fields) - known):
            if not is_off(self.fields[key]):
                raise self.error(
                    short(key),
                    f"= {short(self.fields[key])} is not known, and may change what the codes mean",
                    "remove it if it changes nothing at inference",
                )


def read_json(path: Path) -> Document | None:
    """The JSON object that a file holds; None where there is no such file.

    Raises:
        CheckpointError: no regular file, unreadable, too large, no JSON, no object, or a key that
            occurs twice.
    """
    subject = path.name
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(subject, "is no regular file", _MEND)
        if found.st_size > LARGEST_FILE:
            reason = f"has {found.st_size} bytes; metadata has at most {LARGEST_FILE}"
            raise CheckpointError(subject, reason, _MEND)
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(subject, f"cannot be read ({error.strerror})", _MEND) from error
    try:
        value = json.loads(data, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise CheckpointError(subject, "is nested too deep", _MEND) from error
    except ValueError as error:  # bad UTF-8 and endless digits too
        raise CheckpointError(subject, f"is no JSON ({error})", _MEND) from error
    if not isinstance(value, dict):
        raise CheckpointError(subject, "holds no JSON object", _MEND)
    return Document(subject, value)


def is_off(value: object) -> bool:
    """Whether a value says what an absent key would: null, false or empty, but not a zero."""
    return value is None or value is False or value in ("", [], {})


def short(value: object) -> str:
    """A value for messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dict.

    Raises:
        ValueError: a key occurs twice.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name!r} occurs twice")
            seen.add(name)
    return result
