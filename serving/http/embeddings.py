"""`POST /v1/embeddings`: of models that make no text."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from ...adapters.lease import Lease
from .auth import key_of
from .completions import prompt_tokens
from .encoder import Encoder
from .errors import bad_request
from .generation import errors_of_requests, refusals_counted, refuse_if_stopping, take_lease
from .logs import log_facts
from .metrics import Outcome
from .naming import adapter_of
from .protocol import EmbeddingBody
from .sse import while_connected
from .state import ServerState, state_of

router = APIRouter()

Ids = tuple[int, ...]
Texts = tuple[Ids, ...]


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request, body: EmbeddingBody) -> Response:
    """One vector for each text."""
    state = state_of(request)
    facts = log_facts(request)
    facts["model"] = body.model or state.base_name
    whole = await while_connected(request, _answer(state, body, key_of(request), facts))
    # Nobody reads what is sent to a client that has left.
    return Response(status_code=499) if whole is None else JSONResponse(whole)


async def _answer(
    state: ServerState, body: EmbeddingBody, key: str | None, facts: dict[str, object]
) -> dict[str, Any]:
    with refusals_counted(state):
        refuse_if_stopping(state)
        if state.encoder is None:
            raise bad_request("this model makes text, not embeddings", "model")
        inputs = _inputs(body)
        admitted = state.admission.admitted(len(inputs), key)
    async with asyncio.timeout(state.config.request_timeout):
        with errors_of_requests(state, body.model), admitted:
            with refusals_counted(state):
                adapter = adapter_of(state, body.model)
                lease = await take_lease(state, adapter)
            try:
                vectors, count = await _vectors(state, state.encoder, body, inputs, lease)
            finally:
                if lease is not None:
                    lease.release()
    facts["prompt_tokens"] = count
    encode = _as_base64 if body.encoding_format == "base64" else torch.Tensor.tolist
    return {
        "object": "list",
        "model": body.model or state.base_name,
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _inputs(body: EmbeddingBody) -> list[str | list[int]]:
    given: Any = body.input
    if not given:
        raise bad_request("the input is empty", "input")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


async def _vectors(
    state: ServerState,
    encoder: Encoder,
    body: EmbeddingBody,
    inputs: Sequence[str | list[int]],
    lease: Lease | None,
) -> tuple[torch.Tensor, int]:
    """The vectors, float32 (inputs, dimensions), and how many tokens the inputs have."""
    loop = asyncio.get_running_loop()
    with refusals_counted(state):
        encode = partial(_encoded, state, inputs, body.add_special_tokens)
        texts = await loop.run_in_executor(state.text_threads, encode)
        if body.dimensions is not None and body.dimensions > encoder.width:
            message = f"dimensions={body.dimensions} is more than the model's {encoder.width}"
            raise bad_request(message, "dimensions")
    count = sum(map(len, texts))
    adapter = None if lease is None else lease.name
    digest = None if lease is None else lease.digest
    meter, outcome = state.metrics.began(adapter, count, digest=digest), Outcome.ERROR
    try:
        vectors = torch.empty(len(texts), encoder.width)
        # A forward at a time: other requests come in between, and whoever has left costs no more.
        for places in batches_of(texts, state.config.max_num_batched_tokens):
            run = partial(encoder.run, [texts[place] for place in places], lease)
            vectors[list(places)] = await loop.run_in_executor(state.forward_thread, run)
        outcome = Outcome.STOP
    except asyncio.CancelledError:
        outcome = Outcome.CANCELLED
        raise
    finally:
        meter.ended(outcome, generated=0)
    return encoder.pooling.shorten(vectors, body.dimensions), count


def _encoded(
    state: ServerState, inputs: Sequence[str | list[int]], add_special_tokens: bool
) -> Texts:
    texts = tuple(prompt_tokens(state, text, add_special_tokens, "input") for text in inputs)
    for index, text in enumerate(texts):
        if len(text) > state.max_model_len:
            raise bad_request(
                f"input {index} has {len(text)} tokens, but the model takes {state.max_model_len}",
                "input",
            )
    return texts


def batches_of(texts: Texts, tokens: int) -> list[tuple[int, ...]]:
    """Places of texts that share a forward: of like lengths, up to `tokens` with their padding."""
    batches: list[list[int]] = []
    for place in sorted(range(len(texts)), key=lambda place: -len(texts[place])):
        longest = len(texts[batches[-1][0]]) if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return [tuple(batch) for batch in batches]


def _as_base64(vector: torch.Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
