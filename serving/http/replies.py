"""What both kinds of generation share in their replies: usage, log-probabilities, events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine.requests import Token
from .answer import Piece
from .generation import Generation, Order, generating
from .logs import log_facts
from .protocol import GenerationBody
from .sse import DONE, EventStream, while_connected
from .state import ServerState
from .tokenization import Tokenization

# JSON has no infinity: a token that could not be chosen at all.
_LEAST_LOGPROB = -9999.0

#: Makes the choice of a finished answer, or what a piece adds to one.
Choice = Callable[[Piece, Generation], dict[str, Any]]
Envelope = Mapping[str, Any]


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
    return _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)


def told_ids(body: GenerationBody, piece: Piece) -> dict[str, Any]:
    """The tokens of a piece by their numbers, where the request asks for them."""
    return {"token_ids": [token.id for token in piece.tokens]} if body.return_token_ids else {}


def encode_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


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
    *,
    envelope: Envelope,
    choice: Choice,
    events: Callable[[Generation], AsyncGenerator[list[dict[str, Any]], None]],
    chunk_object: str,
) -> Response:
    """Answer a request, in one piece or as a stream.

    Args:
        request: to be answered.
        state: of the server.
        order: what it asks the engine for.
        body: of it.
        envelope: what the answer holds besides choices and usage.
        choice: of a whole answer.
        events: the choices of each event of a stream.
        chunk_object: what an event of a stream is called.

    Raises:
        ApiError, BranchlineError, TimeoutError: see `generating`; of a stream, they are told in it.
    """
    facts = log_facts(request)
    facts["model"], facts["answer_id"] = envelope["model"], envelope["id"]
    if body.stream:
        stream = _stream(state, order, body, {**envelope, "object": chunk_object}, events, facts)
        return EventStream(stream, state.config.slow_reader_bytes)
    whole = await while_connected(request, _whole(state, order, envelope, choice, facts))
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
    events: Callable[[Generation], AsyncGenerator[list[dict[str, Any]], None]],
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
