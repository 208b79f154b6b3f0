"""Names of modules in a config, as PEFT compares them: exact, fast, and never for long.

Lists and patterns may hold an entry for every module of a large model, and they are the text of a
stranger.  Names are looked up by the ends of a module's name; what is a real regular expression is
matched with a limit on time (`core.expressions`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ..core.errors import AdapterUnsupportedError
from ..core.expressions import LONGEST, Expression, Patience

# Signs that stand for themselves, and dots; without a repeat, such a text has one length.
_FIXED = re.compile(r"\^?(?:[\w\-/: ]|\.|\\[^\w\n])*\$?")
# Names of one length have their dots in few places; each way to have them is looked up once.
_MOST_MASKS = 64
_LITERAL = re.compile(r"[\w\-]*")


def too_slow(key: str, pattern: str, error: TimeoutError) -> AdapterUnsupportedError:
    """What to raise where matching a config's pattern took too long.

    Args:
        key: of the config.
        pattern: the regular expression.
        error: which limit it met.
    """
    shown = repr(pattern) if len(pattern) < 200 else f"{pattern[:200]!r}..."
    return AdapterUnsupportedError(
        "adapter_config.json",
        f"{key}: to match the pattern {shown} with the names of modules takes too long ({error})",
        f"write {key} without nested repeats, or as names of modules",
    )


def check_expressions(texts: Iterable[str], frame: str = "{}") -> None:
    """See that regular expressions can be compiled in the frame that PEFT sets them into.

    Args:
        texts: the expressions of one key.
        frame: with `{}` in the expression's place.

    Raises:
        ValueError: one is none, or they are longer together than any adapter's.
    """
    length = 0
    for text in texts:
        if _LITERAL.fullmatch(text):
            continue
        length += len(text)
        if length > LONGEST:
            raise ValueError(
                f"regular expressions of more than {LONGEST:,} characters together, which no "
                "adapter needs"
            )
        try:
            Expression(frame.replace("{}", text))
        except re.error as error:
            raise ValueError(f"{text[:200]!r} is no regular expression: {error}") from error


def dotted_ends(name: str, lengths: Collection[int]) -> Iterator[str]:
    """A name, and what lies behind each of its dots, where its length is one of `lengths`."""
    size = len(name)
    if size in lengths:
        yield name
    position = name.find(".") + 1
    while position:
        if size - position in lengths:
            yield name[position:]
        position = name.find(".", position) + 1


class DottedEnds:
    """Entries that name a module by its name, or by the end of it behind a dot.

    Args:
        entries: of a list such as `target_modules`.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = frozenset(entries)
        self._lengths = frozenset(map(len, self._entries))

    def matches(self, name: str) -> bool:
        """Whether an entry names this module."""
        return any(end in self._entries for end in dotted_ends(name, self._lengths))

    def unmatched(self, names: Iterable[str]) -> frozenset[str]:
        """The entries that name none of these modules."""
        found = {end for name in names for end in dotted_ends(name, self._lengths)}
        return self._entries - found


class TextEnds:
    """Entries that a module's name ends with as a text, whatever lies before them.

    Args:
        entries: of a list such as `modules_to_save`.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = frozenset(entries)
        self._lengths = tuple(sorted(set(map(len, self._entries))))

    def of(self, name: str) -> list[str]:
        """The entries that the name ends with, the shortest first."""
        size = len(name)
        ends = (name[size - length :] for length in self._lengths if length <= size)
        return [end for end in ends if end in self._entries]


class Within:
    """Entries that stand anywhere in a module's name.

    Args:
        entries: of a list.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = frozenset(entries)
        self._lengths = tuple(set(map(len, self._entries)))

    def has(self, name: str) -> bool:
        """Whether one of them does."""
        return any(
            name[start : start + length] in self._entries
            for length in self._lengths
            for start in range(len(name) - length + 1)
        )


class WholePattern:
    """One expression for whole names.

    Args:
        text: of it.
        key: of the config, for messages.

    Raises:
        re.error: it is no expression.
    """

    def __init__(self, text: str, key: str) -> None:
        self._expression = Expression(text)
        self._key = key
        self._patience = Patience()
        self._known: dict[str, bool] = {}

    def matches(self, name: str) -> bool:
        """As `re.fullmatch`; what a name comes to is kept.

        Raises:
            AdapterUnsupportedError: it takes too long.
        """
        if name not in self._known:
            try:
                match = self._expression.fullmatch(name, self._patience)
            except TimeoutError as error:
                raise too_slow(self._key, self._expression.text, error) from error
            self._known[name] = match is not None
        return self._known[name]


class _Fixed(NamedTuple):
    """An expression whose matches have one length and differ at its dots alone.

    Args:
        text: with a dot wherever any sign may stand.
        wild: where those are.
        anchored: it begins where the name does.
    """

    text: str
    wild: tuple[int, ...]
    anchored: bool


class _Place(NamedTuple):
    """Where an entry stands in the order, and whether it begins where the name does."""

    place: int
    anchored: bool


def _fixed(pattern: str) -> _Fixed | None:
    if not _FIXED.fullmatch(pattern):
        return None
    body = pattern.removeprefix("^")
    anchored = body != pattern
    escaped_end = body.endswith("\\$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 0
    if body.endswith("$") and not escaped_end:
        body = body[:-1]
    if "\\" not in body:
        return _Fixed(body, tuple(i for i, sign in enumerate(body) if sign == "."), anchored)
    signs: list[str] = []
    wild: list[int] = []
    following = iter(body)
    for sign in following:
        if sign == ".":
            wild.append(len(signs))
        signs.append(next(following) if sign == "\\" else sign)
    return _Fixed("".join(signs), tuple(wild), anchored)


class EndPatterns(dict[str, Any]):
    """Values by patterns that the end of a module's name matches; the first that does counts.

    A dict, so that it compares and prints as the config wrote it; it is not changed once made.
    What a name comes to is kept, so that later looks cost nothing.

    Args:
        entries: of a key such as `rank_pattern`.
        key: its name, for messages.

    Attributes:
        frame: the expression into which PEFT's `get_pattern_key` sets a pattern.

    Raises:
        ValueError: see `check_expressions`.
    """

    frame: ClassVar[str] = r"(.*\.)?({})$"
    takes_whole: ClassVar[bool] = True

    def __init__(self, entries: Mapping[str, Any], key: str = "") -> None:
        super().__init__(entries)
        self._key = key
        self._order = tuple(entries)
        self._patience = Patience()
        self._keys: dict[str, str | None] = {}
        self._compiled: dict[int, Expression] = {}
        # By length and by where any sign may stand: the other signs, to the places in the order.
        self._fixed: dict[int, dict[tuple[int, ...], dict[str, list[_Place]]]] = {}
        self._others = tuple(p for p, text in enumerate(self._order) if not self._enter(p, text))
        check_expressions((self._order[place] for place in self._others), self.frame)

    def key_of(self, name: str) -> str:
        """The pattern that counts for a module; its name where none does, as in PEFT.

        Raises:
            AdapterUnsupportedError: a pattern takes too long.
        """
        if self._order and name not in self._keys:
            self._keys[name] = self._first(name)
        key = self._keys.get(name)
        return name if key is None else key

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """The patterns that no name matches, in their order.

        Raises:
            AdapterUnsupportedError: a pattern takes too long.
        """
        found = {self.key_of(name) for name in names}
        broken, others = [name for name in names if "\n" in name], set(self._others)
        for name in names:
            if "\n" not in name:
                found.update(self._order[place] for place in self._fixed_places(name))
        for place, pattern in enumerate(self._order):
            tried = names if place in others else broken
            if pattern not in found and any(self._matches(place, name) for name in tried):
                found.add(pattern)
        return [pattern for pattern in self._order if pattern not in found]

    def _enter(self, place: int, pattern: str) -> bool:
        fixed = _fixed(pattern)
        if fixed is None:
            return False
        alike = self._fixed.setdefault(len(fixed.text), {})
        if fixed.wild not in alike and len(alike) == _MOST_MASKS:
            return False
        entry = _Place(place, fixed.anchored)
        alike.setdefault(fixed.wild, {}).setdefault(fixed.text, []).append(entry)
        return True

    def _first(self, name: str) -> str | None:
        if "\n" in name:
            # No dot stands for a line break, and `$` stands before the last one too.
            first = (p for p in range(len(self._order)) if self._matches(p, name))
            return self._order[place] if (place := next(first, None)) is not None else None
        best = min(self._fixed_places(name), default=len(self._order))
        others = (p for p in self._others if p > best or self._matches(p, name))
        best = min(best, next(others, best))
        return self._order[best] if best < len(self._order) else None

    def _fixed_places(self, name: str) -> Iterator[int]:
        for end in dotted_ends(name, self._fixed):
            is_whole = len(end) == len(name)
            if is_whole and not self.takes_whole:
                continue
            for wild, alike in self._fixed[len(end)].items():
                for place, anchored in alike.get(_masked(end, wild), ()):
                    if is_whole or not anchored:
                        yield place

    def _matches(self, place: int, name: str) -> bool:
        pattern = self._order[place]
        expression = self._compiled.get(place)
        if expression is None:
            expression = Expression(self.frame.replace("{}", pattern))
            self._compiled[place] = expression
        try:
            return expression.match(name, self._patience) is not None
        except TimeoutError as error:
            raise too_slow(self._key, pattern, error) from error


class DottedPatterns(EndPatterns):
    """As `EndPatterns`, for types that ask for a dot before the pattern (FourierFT, C3A)."""

    frame: ClassVar[str] = r".*\.{}$"
    takes_whole: ClassVar[bool] = False


def _masked(text: str, wild: tuple[int, ...]) -> str:
    if not wild:
        return text
    signs = list(text)
    for position in wild:
        signs[position] = "."
    return "".join(signs)
