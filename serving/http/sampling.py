"""How tokens are chosen: from a request's fields, with the model's own defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..engine.requests import Sampling
from .answer import Shape
from .errors import bad_request
from .protocol import GenerationBody
from .state import ServerState

_NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip


def sampling_of(
    state: ServerState,
    body: GenerationBody,
    *,
    prompts: Iterable[tuple[int, ...]],
    max_tokens: int | None,
    usual: int | None,
    logprobs: int | None,
) -> Sampling:
    """The sampling of a request.

    Args:
        state: of the server.
        body: of the request.
        prompts: its tokens.
        max_tokens: that it asks for, if it does.
        usual: how many are made if it does not; None for as many as the longest prompt leaves.
        logprobs: see `Sampling`.

    Raises:
        ApiError: 400, something is beyond what this server or model has.
    """
    most = _most_tokens(state, body, max(map(len, prompts)), max_tokens, usual)
    _check_logprobs(state, logprobs)
    _check_tokens(state, body)
    chosen = {name: _chosen(state, body, name) for name in _NEUTRAL}
    return Sampling(
        max_tokens=most,
        min_tokens=body.min_tokens,
        **{**chosen, "top_k": max(int(chosen["top_k"]), 0)},
        logit_bias=body.biases,
        seed=body.seed,
        logprobs=logprobs,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
    )


def _most_tokens(
    state: ServerState,
    body: GenerationBody,
    longest: int,
    max_tokens: int | None,
    usual: int | None,
) -> int:
    """How many tokens are made at most, after a prompt of `longest`."""
    room = state.max_model_len - longest
    if room < 1:
        raise bad_request(
            f"the prompt has {longest} tokens, but prompt and answer may have "
            f"{state.max_model_len} together",
            "prompt" if hasattr(body, "prompt") else "messages",
        )
    if max_tokens is not None and max_tokens > room:
        raise bad_request(
            f"the prompt has {longest} tokens and max_tokens asks for {max_tokens} more, but "
            f"prompt and answer may have {state.max_model_len} together",
            "max_tokens",
        )
    most = min(room, usual or room) if max_tokens is None else max_tokens
    if body.min_tokens > most:
        message = f"min_tokens={body.min_tokens} is more than the {most} that max_tokens allows"
        raise bad_request(message, "min_tokens")
    return most


def shape_of(body: GenerationBody) -> Shape:
    """How the answers of a request are told."""
    return Shape(
        stops=body.stops,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
    )


def _chosen(state: ServerState, body: GenerationBody, name: str) -> float:
    asked = getattr(body, name)
    return state.sampling_defaults.get(name, _NEUTRAL[name]) if asked is None else asked


def _check_logprobs(state: ServerState, logprobs: int | None) -> None:
    most = state.config.max_logprobs
    if logprobs is not None and logprobs > most:
        raise bad_request(
            f"{logprobs} log-probabilities a token are asked for, but this server tells {most}",
            "logprobs",
        )


def _check_tokens(state: ServerState, body: GenerationBody) -> None:
    size = state.vocab_size
    for name, tokens in (
        ("logit_bias", body.biases),
        ("stop_token_ids", body.stop_token_ids or ()),
    ):
        outside = [token for token in tokens if token >= size]
        if outside:
            message = f"{name} names token {outside[0]}, but the model has {size} tokens"
            raise bad_request(message, name)


def check_answers(state: ServerState, body: GenerationBody) -> None:
    """Refuse more answers than this server makes of one prompt.

    Raises:
        ApiError: 400.
    """
    if body.n > state.config.max_n:
        message = f"n={body.n} answers are asked for, but this server makes {state.config.max_n}"
        raise bad_request(message, "n")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options are for streams: send stream as true", "stream_options")
