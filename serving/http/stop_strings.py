"""Finding stop strings in a text that comes in pieces, and holding back what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def _failures(pattern: str) -> list[int]:
    """For each prefix of `pattern`, its longest proper prefix that it ends with.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977.
    """
    table, length = [0] * len(pattern), 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        length += pattern[index] == pattern[length]
        table[index] = length
    return table


class _Pattern:
    """One stop string, and how much of it the text ends with.

    Args:
        text: the stop string.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._failures = _failures(text)

    def feed(self, character: str) -> bool:
        """Whether the text ends with the stop string, one character later."""
        matched = self.matched
        while matched and self.text[matched] != character:
            matched = self._failures[matched - 1]
        self.matched = matched + (self.text[matched] == character)
        return self.matched == len(self.text)


@dataclass(frozen=True)
class Released:
    """What may be told of a text.

    Attributes:
        text: that no stop string can begin in any more.
        stop: the stop string that ended the text; None while there is none.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """Watches one text for the first stop string that is complete in it.

    What is found does not depend on where the pieces are cut.  Each character costs a constant
    number of steps a stop string.

    Args:
        stops: not empty ones.
        include: leave the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include
        self._held = ""

    def feed(self, text: str) -> Released:
        """What the next piece of the text releases; after a stop, nothing may be fed any more."""
        if not self._patterns:
            return Released(text)
        whole, fresh = self._held + text, len(self._held)
        for index, character in enumerate(text):
            ended = [pattern.text for pattern in self._patterns if pattern.feed(character)]
            if ended:
                end, stop = fresh + index + 1, max(ended, key=len)
                self._held = ""
                return Released(whole[: end if self._include else end - len(stop)], stop)
        held = max(pattern.matched for pattern in self._patterns)
        self._held = whole[len(whole) - held :]
        return Released(whole[: len(whole) - held])

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
