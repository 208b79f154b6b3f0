"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from .answer import Piece
from .auth import key_of
from .completions import prompt_tokens
from .errors import bad_request
from .generation import Generation, Order, Work, refusals_counted
from .protocol import ChatBody
from .replies import Form, chat_logprobs, choice_of, reply
from .sampling import check_answers, sampling_of, shape_of
from .state import ServerState, state_of

router = APIRouter()

_FORM = Form("chatcmpl", "chat.completion", "chat.completion.chunk")


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a chat."""
    state = state_of(request)
    with refusals_counted(state):
        _check(state, body)
    order = Order(
        body.model, body.n, 1, partial(_work, state, body),
        key=key_of(request), headers=request.headers,
    )  # fmt: skip
    return await reply(request, state, order, body, _FORM, _Teller(state, body))


def _check(state: ServerState, body: ChatBody) -> None:
    check_answers(state, body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        message = "max_tokens and max_completion_tokens mean the same, and differ"
        raise bad_request(message, "max_completion_tokens")


def _work(state: ServerState, body: ChatBody, template: str | None) -> Work:
    text = state.chat_templates.render(
        body.messages,
        adapters=template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    tokens = (prompt_tokens(state, text, body.add_special_tokens, "messages"),)
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    sampling = sampling_of(
        state, body, prompts=tokens, max_tokens=most, usual=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )  # fmt: skip
    return Work(tokens, sampling, shape_of(body))


class _Teller:
    """Makes choices of pieces.

    Args:
        state: of the server.
        body: of the request.
    """

    def __init__(self, state: ServerState, body: ChatBody) -> None:
        self._state = state
        self._body = body
        last = body.messages[-1].role
        self._role = last if body.continue_final_message else "assistant"

    def choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        """A whole answer."""
        message = {"role": self._role, "content": piece.text, "refusal": None}
        return self._told(piece, "message", message)

    async def events(self, generation: Generation) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The choices of each event."""
        begun: set[int] = set()
        async for piece in generation.pieces():
            if piece.index not in begun:
                begun.add(piece.index)
                delta = {"role": self._role, "content": ""}
                yield [self._told(Piece(piece.index), "delta", delta)]
            if piece.text or piece.tokens:
                delta = {"content": piece.text}
                told = Piece(piece.index, piece.text, piece.tokens)
                yield [self._told(told, "delta", delta)]
            if piece.finish:
                ended = Piece(piece.index, finish=piece.finish, stop_reason=piece.stop_reason)
                yield [self._told(ended, "delta", {})]

    def _told(self, piece: Piece, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs and (piece.tokens or kind == "message"):
            logprobs = chat_logprobs(piece.tokens, self._state.tokenization)
        return choice_of(self._body, piece, {kind: content}, logprobs)
