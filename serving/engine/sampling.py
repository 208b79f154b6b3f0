"""The choice of the next tokens, for each sequence by its own settings and random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import torch

from .requests import LEAST_LOGPROB, Sampling, Token
from .sequence import Sequence

# Below it a distribution is a point, and logits divided by it overflow.
_COLDEST = 1e-5


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """By row, whether its likeliest token has a finite logit, and no logit is NaN.

    Args:
        logits: float (rows, vocabulary).
    """
    return torch.isfinite(logits.amax(-1)).tolist()


def choose(logits: torch.Tensor, sequences: Rows[Sequence], stops: frozenset[int]) -> list[Token]:
    """The next token of each sequence.

    A token depends on the logits of its own row alone, and on the sequence's own settings.

    Args:
        logits: float32 (rows, vocabulary), finite (see `finite_rows`); not changed.
        sequences: by row.
        stops: the model's own stop tokens.
    """
    adjusted = [row for row, s in enumerate(sequences) if _adjusts(s, stops)]
    scores = logits
    if adjusted:
        scores = logits.clone()
        for row in adjusted:
            _adjust(scores[row], sequences[row], stops)
    chosen = likeliest(scores)
    tokens: list[Token] = []
    for row, sequence in enumerate(sequences):
        sampling, token = sequence.request.sampling, chosen[row]
        if sampling.temperature > _COLDEST:
            token = _draw(scores[row], sequence)
        wanted = sampling.logprobs
        tokens.append(Token(token) if wanted is None else _told(logits[row], token, wanted))
    return tokens


def likeliest(scores: torch.Tensor) -> list[int]:
    """By row, the first token of the highest score.

    Args:
        scores: float32 (rows, vocabulary).
    """
    if scores.device.type == "cpu":
        # Vectorised, which torch's own is not on a CPU.
        return scores.numpy().argmax(-1).tolist()
    return scores.argmax(-1).tolist()


def is_stop(sequence: Sequence, token: int, stops: frozenset[int]) -> bool:
    """Whether a token ends the answer.

    Args:
        sequence: that it is of.
        token: its newest.
        stops: the model's own stop tokens.
    """
    return token in _stops_of(sequence.request.sampling, stops)


def _stops_of(sampling: Sampling, stops: frozenset[int]) -> frozenset[int]:
    return sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | stops


def _adjusts(sequence: Sequence, stops: frozenset[int]) -> bool:
    sampling = sequence.request.sampling
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
        or (sequence.made < sampling.min_tokens and _stops_of(sampling, stops))
    )


def _adjust(scores: torch.Tensor, sequence: Sequence, stops: frozenset[int]) -> None:
    """Penalties, biases and forbidden stops, as vLLM and OpenAI define them; in place."""
    sampling = sequence.request.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=scores.device)
        old = scores[seen]
        factor = sampling.repetition_penalty
        scores[seen] = torch.where(old > 0, old / factor, old * factor)
    if sequence.counts and (sampling.presence_penalty or sampling.frequency_penalty):
        made = torch.tensor(list(sequence.counts), device=scores.device)
        times = torch.tensor(list(sequence.counts.values()), device=scores.device)
        scores[made] -= sampling.frequency_penalty * times + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if sequence.made < sampling.min_tokens:
        for token in _stops_of(sampling, stops):
            scores[token] = -torch.inf


def _draw(scores: torch.Tensor, sequence: Sequence) -> int:
    """One token by temperature, top-k, top-p and min-p, and one random number of the sequence."""
    sampling = sequence.request.sampling
    scaled = scores.double() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[0]:
        values, order = torch.topk(scaled, sampling.top_k)
    elif sampling.top_p < 1.0 or sampling.min_p > 0.0:
        values, order = torch.sort(scaled, descending=True, stable=True)
    else:
        values, order = scaled, None
    shares = torch.softmax(values, -1)
    if order is not None:
        shares = shares[: _kept(shares, sampling)]
    sums = shares.cumsum(-1)
    point = sequence.random.random() * float(sums[-1])
    at = int(torch.searchsorted(sums, point, right=True))
    at = min(at, sums.shape[0] - 1)
    return at if order is None else int(order[at])


def _kept(shares: torch.Tensor, sampling: Sampling) -> int:
    """How many of the likeliest tokens top-p and min-p leave; at least one."""
    kept = shares.shape[0]
    if sampling.top_p < 1.0:
        kept = int(torch.searchsorted(shares.cumsum(-1), sampling.top_p)) + 1
    if sampling.min_p > 0.0:
        kept = min(kept, int((shares >= sampling.min_p * shares[0]).sum()))
    return max(1, min(kept, shares.shape[0]))


def _told(logits: torch.Tensor, token: int, wanted: int) -> Token:
    logprobs = torch.log_softmax(logits, -1)
    top: tuple[tuple[int, float], ...] = ()
    if wanted:
        values, order = torch.topk(logprobs, min(wanted, logprobs.shape[0]))
        top = tuple(zip(order.tolist(), map(_finite, values.tolist()), strict=True))
    return Token(token, _finite(float(logprobs[token])), top)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
