r"""Regular expressions of strangers, matched as `re` matches them, but never for long.

`re` cannot be interrupted, and some expressions take it longer than the universe has.  What cannot
be slow, seen from its text, is left to `re`.  The rest goes to the `regex` package, which knows
when to give up; where the two read a text differently (`[[:alpha:]]`, `a{e}`), it is rewritten so
that both mean the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import regex

#: The longest expression that is compiled; the names of 2,000 modules with bars between them fit.
LONGEST = 2**16

# Sets of signs take long to compile where they hold wide ranges, above all in either case.
_MOST_WIDE_RANGES = 64
_WIDE = 256

# Steps on one name that are over in a moment.
_FEW_STEPS = 10**8
# The regex package writes counted repeats out: an expression of a few signs could fill the memory.
_MOST_WRITTEN_OUT = 20_000

_COUNT = r"\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]*)\}"
_TOKEN = re.compile(
    rf"""
    (?P<comment>\(\?\#[^)]*\))
    | (?P<open>\((?:\?(?:P<[^>]*>|P=|<[=!]|[:=!>]|[a-zA-Z-]+[:)]))?)
    | (?P<close>\))
    | (?P<bar>\|)
    | (?P<times>(?:[*+?]|{_COUNT})[?+]?)
    | (?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
    | (?P<atom>\\N\{{[^}}]*\}}|\\.|.)
    """,
    re.DOTALL | re.VERBOSE,
)
_RANGE = re.compile(r"(\\?.)-(\\?[^\]])", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")


class Patience:
    """Seconds that matching may take, all calls together.

    Args:
        seconds: of them.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self._left = seconds

    def spend(self, match: Callable[[float], Any]) -> Any:
        """What `match` gives, called with the seconds that are left.

        Raises:
            TimeoutError: none are left.
        """
        if self._left <= 0:
            raise TimeoutError(f"takes more than {self.seconds:g} s")
        begin = time.perf_counter()
        try:
            return match(self._left)
        except TimeoutError as error:
            raise TimeoutError(f"takes more than {self.seconds:g} s") from error
        finally:
            self._left -= time.perf_counter() - begin


class _Cost(NamedTuple):
    """What an expression may cost.

    Args:
        loops: how many parts may take any length.
        ways: in how many ways the rest can be taken.
        nested: whether something is repeated that is more than one sign.
        size: signs, with counted repeats written out.
    """

    loops: int
    ways: int
    nested: bool
    size: int


class Expression:
    """One regular expression, as `re` reads it.

    Args:
        text: of it.

    Raises:
        re.error: it is none, is longer than `LONGEST`, has more sets with wide ranges than any
            honest one, or is written in verbose mode.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > LONGEST:
            raise re.error(f"is longer than {LONGEST:,} characters", text[:80])
        if _wide_ranges(text) > _MOST_WIDE_RANGES:
            raise re.error(f"has more than {_MOST_WIDE_RANGES} sets with wide ranges", text[:80])
        try:
            self._plain = re.compile(text)
        except (RecursionError, OverflowError) as error:
            raise re.error(f"cannot be compiled: {error}", text) from error
        if _VERBOSE.search(text):
            raise re.error("is written in verbose mode, which is not served", text)

    def match(self, name: str, patience: Patience) -> re.Match[str] | None:
        """As `re.match`.

        Raises:
            TimeoutError: it takes longer than `patience` has left, or more memory than is sane.
        """
        return self._run("match", name, patience)

    def fullmatch(self, name: str, patience: Patience) -> re.Match[str] | None:
        """As `re.fullmatch`.

        Raises:
            TimeoutError: as `match`.
        """
        return self._run("fullmatch", name, patience)

    def _run(self, how: str, name: str, patience: Patience) -> Any:
        cost = self._cost
        if not cost.nested and cost.ways * max(len(name), 2) ** cost.loops <= _FEW_STEPS:
            run = getattr(self._plain, how)
            return patience.spend(lambda left: run(name))
        if not name.isascii():
            # The two know different versions of Unicode.
            raise TimeoutError("may take for ever, and the name is not of ASCII alone")
        run = getattr(self._interruptible, how)
        return patience.spend(lambda left: run(name, timeout=left, concurrent=True))

    @cached_property
    def _cost(self) -> _Cost:
        return _cost(self.text)

    @cached_property
    def _interruptible(self) -> Any:
        if self._cost.size > _MOST_WRITTEN_OUT:
            raise TimeoutError(f"repeats {self._cost.size:,} signs")
        try:
            return regex.compile(_rewritten(self.text), regex.VERSION0)
        except (regex.error, RecursionError, OverflowError) as error:
            raise TimeoutError(f"cannot be matched with a limit on time: {error}") from error


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    for found in _TOKEN.finditer(text):
        yield str(found.lastgroup), found[0]


def _cost(text: str) -> _Cost:
    loops, ways, nested = 0, 1, False
    # Of each open group: its size and how many branches it has.
    open_groups: list[list[int]] = [[0, 1]]
    last, after_group = 0, False
    for kind, token in _tokens(text):
        if kind == "open" and not token.endswith(")"):
            open_groups.append([0, 1])
        elif kind == "close" and len(open_groups) > 1:
            last, branches = open_groups.pop()
            ways *= branches
            open_groups[-1][0] += last
        elif kind == "bar":
            open_groups[-1][1] += 1
        elif kind == "times" and token[0] == "?":
            ways *= 2
        elif kind == "times":
            loops += 1
            nested |= after_group
            counts = [int(number) for number in re.findall("[0-9]+", token)]
            open_groups[-1][0] += last * max(max(counts, default=1) - 1, 0)
            # A repeat of the repeat counts all of it.
            last *= max(counts, default=1)
        elif kind in ("atom", "set"):
            last = 1
            open_groups[-1][0] += 1
        # `re` reads over a comment: what comes behind it repeats the group before it.
        after_group = kind == "close" or (after_group and kind == "comment")
        # Beyond this it does not matter by how much.
        ways = min(ways, _FEW_STEPS + 1)
    return _Cost(loops, ways * open_groups[0][1], nested, open_groups[0][0])


def _wide_ranges(text: str) -> int:
    """How many ranges of more than `_WIDE` signs, or of ends that are escaped, the sets hold."""
    sets = (token for kind, token in _tokens(text) if kind == "set")
    return sum(
        "\\" in found[0] or ord(found[2]) - ord(found[1]) > _WIDE
        for token in sets
        for found in _RANGE.finditer(token)
    )


def _rewritten(text: str) -> str:
    """The expression for the regex package."""
    parts = []
    for kind, token in _tokens(text):
        if kind == "set":
            parts.append(token[0] + token[1:].replace("\\[", "[").replace("[", "\\["))
        elif kind == "times" and token.startswith("{,"):
            parts.append("{0" + token[1:])
        elif token == "{":
            parts.append("\\{")
        elif kind != "comment":
            parts.append(token)
    return "".join(parts)
