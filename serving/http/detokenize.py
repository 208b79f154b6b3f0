"""The text of an answer while its tokens come one by one."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenization import Tokenization

# At least so many tokens tell a decoder how the next one joins: with a space before it, say.
_CONTEXT = 5
# What is not whole after so many tokens never will be, but for a character that has just begun: a
# run of stray bytes and of real U+FFFD, three tokens each, may stand before one of four.
_MOST_TOKENS_BROKEN = 24
_MOST_BEGUN = 3
_LONGEST_WINDOW = 64
_BROKEN = "\ufffd"


class Detokenizer:
    """Decodes a few tokens at a time, so that the cost is linear in the answer's length.

    A token's text depends on those before it, so it is what a window of tokens reads more than
    the same window without it.  Half a character at the window's end is not told, and no window
    begins with one: a decoder may give up a whole run of bytes for it.

    Args:
        tokenization: decodes.
        prompt: tokens that the answer goes on from.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self,
        tokenization: Tokenization,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenization = tokenization
        self._skip = skip_special_tokens
        self._window = self._context(prompt)
        self._told = self._decode().rstrip(_BROKEN)
        self._waiting = 0
        # Places in the window at which all text before had been told.
        self._whole: list[int] = []

    def feed(self, token: int) -> str:
        """The text that is certain with one token more; empty while a character is not whole."""
        self._window.append(token)
        text = self._decode()
        self._waiting += 1
        is_whole = not text.endswith(_BROKEN)
        if not is_whole:
            hopeless = self._waiting >= _MOST_TOKENS_BROKEN
            text = text[:-_MOST_BEGUN] if hopeless else text.rstrip(_BROKEN)
        fresh = text[len(self._told) :]
        if fresh or is_whole:
            self._told, self._waiting = (text if fresh else self._told), 0
        if len(self._window) > _LONGEST_WINDOW:
            self._move(len(self._window) - _CONTEXT)
        elif is_whole and fresh:
            self._whole.append(len(self._window))
            early = [at for at in self._whole if at <= len(self._window) - _CONTEXT]
            if early:
                self._move(early[-1])
        return fresh

    def flush(self) -> str:
        """What is left at the end, broken characters as U+FFFD."""
        text = self._decode()
        fresh = text[len(self._told) :]
        self._told, self._waiting = text, 0
        return fresh

    def _move(self, start: int) -> None:
        """Let the window begin at that token."""
        self._window = self._window[start:]
        self._whole = [at - start for at in self._whole if at > start]
        text = self._decode()
        self._told = text if not self._waiting else text.rstrip(_BROKEN)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        for start in range(max(0, len(prompt) - _CONTEXT), len(prompt)):
            context = list(prompt[start:])
            if not self._tokenization.decode(context, self._skip).startswith(_BROKEN):
                return context
        return list(prompt[-_CONTEXT:])

    def _decode(self) -> str:
        return self._tokenization.decode(self._window, self._skip)
