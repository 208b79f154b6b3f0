"""One answer: from what the engine made to what the client is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.requests import FinishReason, Token, Update
from .detokenize import Detokenizer
from .stop_strings import StopStrings
from .tokenization import Tokenization


@dataclass(frozen=True)
class Shape:
    """How answers of a request are told.

    Attributes:
        stops: stop strings.
        include_stop: they stay in the text, and so do stop tokens.
        skip_special_tokens: special tokens are left out of the text.
        min_tokens: stop strings are not looked for in the first ones.
        stop_token_ids: that the request brings; what it is told of as the reason of a stop.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Piece:
    """What one step adds to an answer.

    Attributes:
        index: of the answer in its request.
        text: to be told.
        tokens: whose text begins before the end of what was told so far, and was not told yet.
        finish: why the answer ended; None while it goes on.
        stop_reason: the stop string, or the request's stop token, that ended it.
    """

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


class Answer:
    """Makes pieces of updates.

    Args:
        index: of the answer in its request.
        tokenization: decodes.
        prompt: the tokens it goes on from.
        shape: how it is told.

    Attributes:
        generated: tokens that were made.
        finish: why it ended; None while it goes on.
    """

    def __init__(
        self, index: int, tokenization: Tokenization, prompt: Sequence[int], shape: Shape
    ) -> None:
        self.index = index
        self.generated = 0
        self.finish: FinishReason | None = None
        self._shape = shape
        self._text = Detokenizer(tokenization, prompt, shape.skip_special_tokens)
        self._stops = StopStrings(shape.stops, shape.include_stop)
        self._waiting: list[tuple[int, Token]] = []
        self._made = 0
        self._released = 0
        self._stop_reason: str | int | None = None

    def take(self, update: Update) -> Piece:
        """What an update adds.

        After a stop string, `finish` is `STOP` while the engine still goes on: cancel it.
        """
        told: list[str] = []
        for place, token in enumerate(update.tokens):
            ends = update.finish is FinishReason.STOP and place == len(update.tokens) - 1
            if self._push(token, told, ends=ends):
                return self._piece(told, FinishReason.STOP)
        if update.finish is None:
            return self._piece(told, None)
        if self._feed(self._text.flush(), told):
            return self._piece(told, FinishReason.STOP)
        rest = self._stops.flush()
        self._released += len(rest)
        told.append(rest)
        return self._piece(told, update.finish)

    def _push(self, token: Token, told: list[str], *, ends: bool) -> bool:
        """Take one token; whether a stop string is complete.

        Args:
            token: that was made.
            told: gets what may be told.
            ends: it is a stop token.
        """
        self.generated += 1
        if ends and token.id in self._shape.stop_token_ids:
            self._stop_reason = token.id
        self._waiting.append((self._made, token))
        silent = ends and not self._shape.include_stop
        return not silent and self._feed(self._text.feed(token.id), told)

    def _feed(self, text: str, told: list[str]) -> bool:
        self._made += len(text)
        if self.generated < self._shape.min_tokens:
            self._released += len(text)
            told.append(text)
            return False
        released = self._stops.feed(text)
        self._released += len(released.text)
        told.append(released.text)
        if released.stop is not None:
            self._stop_reason = released.stop
        return released.stop is not None

    def _piece(self, told: list[str], finish: FinishReason | None) -> Piece:
        self.finish = finish
        if finish is None or (finish is FinishReason.STOP and self._released < self._made):
            # A token of the stop string would tell it.
            tokens = tuple(token for start, token in self._waiting if start < self._released)
        else:
            tokens = tuple(token for _, token in self._waiting)
        self._waiting = self._waiting[len(tokens) :]
        return Piece(self.index, "".join(told), tokens, finish, self._stop_reason)
