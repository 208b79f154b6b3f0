"""Which linears the entries of a list name, by the rules of the tool that wrote the list.

A list may hold tens of thousands of entries. Plain names are looked up; only real patterns are
compiled, and tried on the names that begin with the pattern's literal part.
"""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from ...core.expressions import Expression, Patience


class How(StrEnum):
    """How an entry is compared with a full name; "at dots" means whole components."""

    EVERY = "every"
    EXACT = "exact"
    #: The name itself, or what lies below it.
    UNDER = "under"
    #: The name's beginning or its end, at dots.
    EITHER_END = "either end"
    #: The name's beginning, anywhere.
    BEGIN = "begin"
    PATTERN = "pattern"


class Entry(NamedTuple):
    """An entry of a list, read in its dialect.

    Args:
        how: the comparison.
        text: a name, or for PATTERN a regular expression that is matched from the start.
    """

    how: How
    text: str = ""


#: Reads an entry; raises `re.error` for a pattern that is none.
Dialect = Callable[[str], Entry]

#: Seconds that one pattern may take on one name, which are microseconds for any sane one.
_PATIENCE = 1.0
_GLOB = re.compile(r"[*?\[]")
_PLAIN = re.compile(r"[\w.\-]+")
# Behind or before a dot, or at the end; written without alternatives, so that `literal` reads it.
_AT_DOT = r"(?!(?<!\.)[^.])"


def compressed_tensors(entry: str) -> Entry:
    """Full names, the class name "Linear", and `re:` from the start of a name, open at its end."""
    if entry.startswith("re:"):
        return _pattern(entry.removeprefix("re:"))
    return Entry(How.EVERY) if entry == "Linear" else Entry(How.EXACT, entry)


def transformers(entry: str) -> Entry:
    """Names that a name begins or ends with, at dots, and regular expressions that end at a dot."""
    if entry.startswith("re:"):
        return _pattern(entry.removeprefix("re:"))
    if _PLAIN.fullmatch(entry):
        return Entry(How.EITHER_END, entry)
    grouped = f"(?:{entry})" if "|" in entry else entry
    return Entry(How.PATTERN, grouped + _AT_DOT)


def modelopt(entry: str) -> Entry:
    """Globs over full names; a name without wildcards covers what lies below it, too."""
    if not _GLOB.search(entry):
        return Entry(How.UNDER, entry)
    if entry.endswith("*") and not _GLOB.search(entry[:-1]):
        return Entry(How.BEGIN, entry[:-1])
    return Entry(How.PATTERN, _glob(entry))


def quark(entry: str) -> Entry:
    """Full names, globs over full names, and `re:` from the start of the name."""
    if entry.startswith("re:"):
        return _pattern(entry.removeprefix("re:"))
    if not _GLOB.search(entry):
        return Entry(How.EXACT, entry)
    return Entry(How.PATTERN, _glob(entry))


def _glob(entry: str) -> str:
    # Without the group and its flag, which are about line breaks, the literal part comes first.
    return fnmatch.translate(entry).removeprefix("(?s:").removesuffix(r")\Z") + r"\Z"


def _pattern(expression: str) -> Entry:
    # To compile tens of thousands of names in the dress of patterns would take long.
    text, rest = literal(expression)
    if rest == "":
        return Entry(How.BEGIN, text)
    return Entry(How.EXACT, text) if rest == "$" else Entry(How.PATTERN, expression)


class LinearNames:
    """The names of a model's linears, arranged so that an entry is found without reading them all.

    Args:
        names: full names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._all = frozenset(names)

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._all)

    @cached_property
    def _backwards(self) -> list[str]:
        return sorted(name[::-1] for name in self._all)

    def matching(self, entry: Entry) -> Sequence[str]:
        """The names that an entry means.

        Raises:
            re.error: the entry's text is no regular expression, or one that takes too long.
        """
        how, text = entry
        if how == How.EVERY:
            return self._sorted
        if how == How.BEGIN:
            return _beginning(self._sorted, text)
        if how == How.PATTERN:
            return _matching(text, _beginning(self._sorted, literal(text)[0]))
        found = [text] if text in self._all else []
        if how in (How.UNDER, How.EITHER_END):
            found += _beginning(self._sorted, text + ".")
        if how == How.EITHER_END:
            found += [name[::-1] for name in _beginning(self._backwards, f".{text}"[::-1])]
        return found


def _matching(text: str, names: Iterable[str]) -> list[str]:
    expression, found = Expression(text), []
    for name in names:
        try:
            # For each name anew: a list may hold tens of thousands of sane entries.
            if expression.match(name, Patience(_PATIENCE)):
                found.append(name)
        except TimeoutError as error:
            raise re.error(f"{error} on the name {name}", text) from error
    return found


def _beginning(ordered: list[str], text: str) -> list[str]:
    if not text:
        return ordered
    first = bisect_left(ordered, text)
    # The smallest string behind all that begin so. The last code point has no successor.
    behind = text[:-1] + chr(min(ord(text[-1]) + 1, 0x10FFFF))
    return ordered[first : bisect_left(ordered, behind, lo=first)]


def literal(pattern: str) -> tuple[str, str]:
    """What all matches of a regular expression begin with, and the rest of the expression.

    The first is empty where it is not plain to see.
    """
    if "|" in pattern:
        return "", pattern
    found: list[str] = []
    starts: list[int] = []
    position = 0
    while position < len(pattern):
        escaped = pattern[position] == "\\" and pattern[position + 1 : position + 2] in (".", "-")
        if not escaped and not pattern[position].isalnum() and pattern[position] != "_":
            break
        starts.append(position)
        position += 1 if escaped else 0
        found.append(pattern[position])
        position += 1
    # A quantifier is about the character before it.
    if found and pattern[position : position + 1] in ("?", "*", "{"):
        position = starts.pop()
        found.pop()
    return "".join(found), pattern[position:]
