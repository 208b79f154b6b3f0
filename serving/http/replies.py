"""What both kinds of generation share in their replies: usage, log-probabilities, events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine.requests import LEAST_LOGPROB, Token
from .answer import Piece
from .errors import encode_event
from .generation import Generation, Order, generating
from .logs import log_facts
from .protocol import GenerationBody
from .sse import DONE, EventStream, while_connected
from .state import ServerState
from .tokenization import Tokenization

Choice = Callable[[Piece, Generation], dict[str, Any]]
Events = Callable[[Generation], AsyncGenerator[list[dict[str, Any]], None]]
Envelope = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """What one kind of generation calls its replies.

    Attributes:
        prefix: of their ids.
        whole: an answer in one piece.
        chunk: an event of a stream.
    """

    prefix: str
    whole: str
    chunk: str


class Teller(Protocol):
    """Makes choices of pieces."""

    def choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        """A whole answer."""
        ...

    def events(self, generation: Generation) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The choices of each event."""
        ...


def usage_of(generation: Generation) -> dict[str, Any]:
    """How many tokens a request took so far."""
    prompt, generated = generation.prompt_tokens, generation.generated_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def finite(logprob: float | None) -> float:
    """A log-probability as JSON can write it."""
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)


def choice_of(
    body: GenerationBody, piece: Piece, content: Mapping[str, Any], logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """What the choices of both kinds hold.

    Args:
        body: of the request.
        piece: that is told.
        content: what its kind tells the text in.
        logprobs: of its tokens; None where they were not asked for.
    """
    told = {
        "index": piece.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": None if piece.finish is None else piece.finish.value,
        "stop_reason": piece.stop_reason,
    }
    if body.return_token_ids:
        told["token_ids"] = [token.id for token in piece.tokens]
    return told


def merged(pieces: Sequence[Piece]) -> Piece:
    """A whole answer, from its pieces."""
    last = pieces[-1]
    tokens: tuple[Token, ...] = tuple(token for piece in pieces for token in piece.tokens)
    text = "".join(piece.text for piece in pieces)
    return Piece(last.index, text, tokens, last.finish, last.stop_reason)


async def reply(
    request: Request,
    state: ServerState,
    order: Order,
    body: GenerationBody,
    form: Form,
    teller: Teller,
) -> Response:
    """Answer a request, in one piece or as a stream.

    Args:
        request: to be answered.
        state: of the server.
        order: what it asks the engine for.
        body: of it.
        form: what the reply is called.
        teller: makes its choices.

    Raises:
        ApiError, BranchlineError, TimeoutError: see `generating`; of a stream, they are told in it.
    """
    envelope = {
        "id": f"{form.prefix}-{order.id}",
        "object": form.chunk if body.stream else form.whole,
        "created": int(time.time()),
        "model": body.model or state.base_name,
        "system_fingerprint": None,
    }
    facts = log_facts(request)
    facts["model"], facts["answer_id"] = envelope["model"], envelope["id"]
    if body.stream:
        stream = _stream(state, order, body, envelope, teller.events, facts)
        return EventStream(stream, state.config.slow_reader_bytes)
    whole = await while_connected(request, _whole(state, order, envelope, teller.choice, facts))
    # Nobody reads what is sent to a client that has left.
    return Response(status_code=499) if whole is None else JSONResponse(whole)


async def _whole(
    state: ServerState, order: Order, envelope: Envelope, choice: Choice, facts: dict[str, object]
) -> dict[str, Any]:
    async with generating(state, order) as generation:
        try:
            pieces: list[list[Piece]] = [[] for _ in generation.answers]
            async for piece in generation.pieces():
                pieces[piece.index].append(piece)
        finally:
            _note(facts, generation)
        choices = [choice(merged(answer), generation) for answer in pieces]
        return {**envelope, "choices": choices, "usage": usage_of(generation)}


async def _stream(
    state: ServerState,
    order: Order,
    body: GenerationBody,
    envelope: Envelope,
    events: Events,
    facts: dict[str, object],
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    include_usage = options is not None and options.include_usage
    always = options is not None and options.continuous_usage_stats
    async with generating(state, order) as generation:
        try:
            async for choices in events(generation):
                usage: dict[str, Any] = {}
                if always or include_usage:
                    usage["usage"] = usage_of(generation) if always else None
                yield encode_event({**envelope, "choices": choices, **usage})
            if include_usage:
                yield encode_event({**envelope, "choices": [], "usage": usage_of(generation)})
        finally:
            _note(facts, generation)
    yield DONE


def _note(facts: dict[str, object], generation: Generation) -> None:
    if generation.adapter is not None:
        facts["adapter"] = generation.adapter
    facts["prompt_tokens"] = generation.prompt_tokens
    facts["completion_tokens"] = generation.generated_tokens


def chat_logprobs(tokens: Sequence[Token], tokenization: Tokenization) -> dict[str, Any]:
    """Log-probabilities as chats tell them."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": tokenization.name_of(token),
            "logprob": finite(logprob),
            "bytes": list(tokenization.bytes_of(token)),
        }

    content = [
        {
            **entry(token.id, token.logprob),
            "top_logprobs": [entry(other, logprob) for other, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[Token], tokenization: Tokenization, offset: int
) -> tuple[dict[str, Any], int]:
    """Log-probabilities as completions tell them, and where the next token's text begins.

    Args:
        tokens: of an answer.
        tokenization: of the model.
        offset: where the first one's text begins.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(tokenization.text_of(token.id))
    told = {
        "tokens": [tokenization.name_of(token.id) for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, tokenization) for token in tokens],
        "text_offset": offsets,
    }
    return told, offset


def _top(token: Token, tokenization: Tokenization) -> dict[str, float]:
    """The likeliest tokens and the chosen one; of two with one text the likelier is told."""
    found: dict[int, float | None] = dict(token.top)
    found.setdefault(token.id, token.logprob)
    return {tokenization.name_of(id): finite(lp) for id, lp in reversed(found.items())}
