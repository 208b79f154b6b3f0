"""What the engine is asked for, and what it answers: plain values, shared with the HTTP layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ...adapters.lease import Lease
from ...core.errors import BranchlineError

#: The log-probability of a token that could not be chosen at all: JSON has no infinity.
LEAST_LOGPROB = -9999.0


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; names and meanings as in OpenAI's and vLLM's interfaces.

    Attributes:
        max_tokens: most tokens that are made.
        min_tokens: stop tokens are not chosen before that many.
        temperature: 0 is greedy, and the rest is then without effect but for the penalties.
        top_p: keep the likeliest tokens that together reach this probability.
        top_k: keep that many; 0 keeps all.
        min_p: keep tokens of at least this share of the likeliest one's probability.
        presence_penalty: subtracted from the logits of tokens that were made already.
        frequency_penalty: subtracted once for each time that they were made.
        repetition_penalty: logits of tokens of the prompt and the answer are divided (or, below
            0, multiplied) by it.
        logit_bias: added to logits, by token.
        seed: of this request's own random numbers; None draws one.
        logprobs: how many of the likeliest tokens are told beside the chosen one; None for no
            log-probabilities at all.
        stop_token_ids: end the answer, beside the model's own.
        ignore_eos: the model's own stop tokens are tokens like others.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Token:
    """One token of an answer.

    Attributes:
        id: of the token.
        logprob: its log-probability by the model's logits (before temperature and penalties), in
            nats; None where they were not asked for.
        top: the likeliest tokens and theirs, likeliest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Update:
    """What one step brought a request.

    Attributes:
        tokens: made in this step.
        finish: why it ended; None while it goes on.  The last update of a request has it.
        error: of a request that failed.
        cached_tokens: of the prompt, taken from the prefix cache; told once.
        started_at: `time.perf_counter()` when its first forward began; told once.
    """

    tokens: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    error: BranchlineError | None = None
    cached_tokens: int = 0
    started_at: float | None = None


#: Called in the engine's thread, at most once a step: it must return at once and not raise.
Sink = Callable[[Update], None]


@dataclass(frozen=True)
class GenerationRequest:
    """One answer that is to be made.

    Attributes:
        request_id: unique among those that run.
        prompt: its tokens, at least one.
        sampling: how tokens are chosen.
        lease: of the adapter; None for the base model.  Whoever made it releases it, after the
            last update.
        sink: takes the updates.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    sink: Sink
    lease: Lease | None = None


@dataclass(frozen=True)
class EngineStats:
    """A moment of the engine.

    Attributes:
        running: requests that hold blocks of the cache.
        waiting: requests that do not yet.
        running_by_adapter: their adapters' names (base requests are left out).
        waiting_by_adapter: the same of those that wait.
        blocks: of the cache.
        used_blocks: held by requests.
        steps: forwards so far.
        prompt_tokens: computed so far.
        cached_tokens: of prompts, taken from the prefix cache so far.
        generated_tokens: made so far.
        failed_requests: so far.
        preemptions: requests that gave their blocks back and began anew, so far.
        slot_hits: requests whose adapter had a slot at their first forward, so far.
        slot_misses: those whose adapter had to be given one.
    """

    running: int
    waiting: int
    running_by_adapter: Mapping[str, int]
    waiting_by_adapter: Mapping[str, int]
    blocks: int
    used_blocks: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    failed_requests: int
    preemptions: int
    slot_hits: int = 0
    slot_misses: int = 0
