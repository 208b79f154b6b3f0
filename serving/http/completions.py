"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from .answer import Piece
from .auth import key_of
from .errors import ApiError, bad_request
from .generation import Generation, Order, Work, refusals_counted
from .protocol import CompletionBody
from .replies import Form, choice_of, completion_logprobs, reply
from .sampling import check_answers, sampling_of, shape_of
from .state import ServerState, state_of

router = APIRouter()

_FORM = Form("cmpl", "text_completion", "text_completion")

_USUAL_TOKENS = 16


@router.post("/v1/completions", response_model=None)
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continue prompts."""
    state = state_of(request)
    with refusals_counted(state):
        _check(state, body)
    prompts = _prompts(body)
    order = Order(
        body.model, body.n, len(prompts), partial(_work, state, body, prompts),
        key=key_of(request), headers=request.headers,
    )  # fmt: skip
    return await reply(request, state, order, body, _FORM, _Teller(state, body))


def _check(state: ServerState, body: CompletionBody) -> None:
    check_answers(state, body)
    if body.best_of not in (None, body.n):
        raise bad_request(
            f"best_of={body.best_of} with n={body.n} is not served: every answer is told",
            "best_of",
        )
    if body.echo and body.logprobs is not None:
        raise bad_request("log-probabilities of the prompt (echo) are not served", "logprobs")
    if not body.prompt:
        raise bad_request("the prompt is empty", "prompt")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, one by one."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _work(
    state: ServerState, body: CompletionBody, prompts: list[str | list[int]], template: str | None
) -> Work:
    # Only chats have a template.
    del template
    tokens = tuple(prompt_tokens(state, p, body.add_special_tokens, "prompt") for p in prompts)
    sampling = sampling_of(
        state, body, prompts=tokens, max_tokens=body.max_tokens, usual=_USUAL_TOKENS,
        logprobs=body.logprobs,
    )  # fmt: skip
    return Work(tokens, sampling, shape_of(body))


def prompt_tokens(
    state: ServerState, prompt: str | list[int], add_special_tokens: bool, param: str
) -> tuple[int, ...]:
    """The tokens of one prompt.

    Raises:
        ApiError: 400, there are none, or the model does not have them.
    """
    if isinstance(prompt, str):
        prompt = state.tokenization.encode(prompt, add_special_tokens)
    if not prompt:
        raise bad_request("the prompt is empty: it has no tokens", param)
    outside = next((token for token in prompt if token >= state.vocab_size), None)
    if outside is not None:
        raise ApiError(
            400, f"token {outside} is none of the model's {state.vocab_size}", param=param
        )
    return tuple(prompt)


class _Teller:
    """Makes choices of pieces.

    Args:
        state: of the server.
        body: of the request.
    """

    def __init__(self, state: ServerState, body: CompletionBody) -> None:
        self._state = state
        self._body = body

    def choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        """A whole answer."""
        told, _ = self._told(piece, 0)
        return {**told, "text": self._prompt(piece.index, generation) + piece.text}

    async def events(self, generation: Generation) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The choices of each event."""
        offsets = [0] * len(generation.answers)
        begun = [not self._body.echo] * len(generation.answers)
        async for piece in generation.pieces():
            if not (piece.text or piece.tokens or piece.finish):
                continue
            told, offsets[piece.index] = self._told(piece, offsets[piece.index])
            if not begun[piece.index]:
                begun[piece.index] = True
                told["text"] = self._prompt(piece.index, generation) + piece.text
            yield [told]

    def _told(self, piece: Piece, offset: int) -> tuple[dict[str, Any], int]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs, offset = completion_logprobs(piece.tokens, self._state.tokenization, offset)
        return choice_of(self._body, piece, {"text": piece.text}, logprobs), offset

    def _prompt(self, index: int, generation: Generation) -> str:
        """What `echo` puts before an answer."""
        if not self._body.echo:
            return ""
        place = index // self._body.n
        given = _prompts(self._body)[place]
        if isinstance(given, str):
            return given
        tokens = generation.work.prompts[place]
        return self._state.tokenization.decode(tokens, self._body.skip_special_tokens)
