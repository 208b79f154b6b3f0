"""What a request is refused for, and what is read of a model once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ...core.errors import BatchError, NonFiniteError, RequestTooLongError
from .requests import GenerationRequest
from .sequence import Sequence


def check_request(request: GenerationRequest, vocabulary: int, max_model_len: int) -> None:
    """Refuse what cannot be answered.

    Args:
        request: that is to be answered.
        vocabulary: how many tokens the model has.
        max_model_len: most tokens of a prompt and its answer.

    Raises:
        BatchError: an empty prompt, a token that the model has not, or no tokens asked for.
        RequestTooLongError: prompt and answer do not fit.
    """
    subject = f"request {request.request_id!r}"
    if not request.prompt:
        raise BatchError(subject, "has an empty prompt", "give it at least one token")
    outside = next((t for t in request.prompt if not 0 <= t < vocabulary), None)
    if outside is not None:
        raise BatchError(
            subject,
            f"has token {outside}, but the model has tokens 0 to {vocabulary - 1}",
            "encode the prompt with the model's tokenizer",
        )
    tokens = request.sampling.max_tokens
    if tokens < 1:
        raise BatchError(subject, f"asks for {tokens} tokens", "ask for at least one")
    if len(request.prompt) + tokens > max_model_len:
        raise RequestTooLongError(
            subject,
            f"has {len(request.prompt)} prompt tokens and asks for {tokens} more, but prompt "
            f"and answer may have {max_model_len} together",
            "shorten the prompt, ask for fewer tokens, or start with a higher --max-model-len",
        )


def non_finite(sequence: Sequence) -> NonFiniteError:
    """Of a sequence whose logits hold NaN or infinity."""
    lease = sequence.lease
    by = "the base model" if lease is None else f"adapter '{lease.name}'"
    return NonFiniteError(
        f"request {sequence.request_id!r}",
        f"{by} gave logits that are not finite",
        "check its weights: they overflow on this input",
    )


def stop_tokens_of(model: Any) -> frozenset[int]:
    """The tokens that end a model's answers, by its generation config."""
    found = model.generation_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, list | tuple) else frozenset({found})


def seeds_from(seed: int) -> Iterator[int]:
    """Seeds for requests that bring none, the same after every start with the same `seed`."""
    source = random.Random(seed)
    while True:
        yield source.getrandbits(64)
