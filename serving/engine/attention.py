"""Attention over the paged cache, for sequences that lie one after the other in one.

Registered with transformers as an attention implementation.  Outside of a step of the engine the
model computes as before (torch's scaled dot product attention).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...core.errors import WrapError
from .decode import Decodes, Views
from .scaled import scaled_attention

IMPLEMENTATION = "branchline_paged"


@dataclass(frozen=True, eq=False)
class Prefill:
    """The tokens of one sequence that has more than one in this step.

    Attributes:
        begin: its first token in the step.
        end: behind its last one.
        read: int64 (tokens before these,): where their keys and values lie; None for none.
        mask: (tokens, keys), added to scores: 0 or -inf; None for plain causal.
    """

    begin: int
    end: int
    read: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What one step reads and writes of one kind of layer's cache.

    Attributes:
        write: int64 (tokens,): where the keys and values go of the tokens from `written_from` on.
        written_from: the first token of the step that the decodes do not write themselves.
        decodes: the sequences of one token; they come first in the step.
        prefills: the other sequences.
        reads_first: the new keys may overwrite those that are read (a window's ring).
    """

    write: torch.Tensor
    written_from: int
    decodes: Decodes
    prefills: tuple[Prefill, ...]
    reads_first: bool

    def put(self, cache: torch.Tensor, new: torch.Tensor) -> None:
        """Keep what the step's tokens have, (tokens, heads, width)."""
        if self.write.shape[0]:
            cache.index_copy_(0, self.write, new[self.written_from :])


@dataclass(frozen=True, eq=False)
class StepAttention:
    """What a step's attention layers take.

    Attributes:
        views: keys and values of the cache by layer, each (places, heads, head width).
        plans: by layer.
        seen: layers that were asked, to notice a model that does not ask.
    """

    views: dict[int, Views]
    plans: dict[int, AttentionPlan]
    seen: set[int] = field(default_factory=set)


_running = threading.local()


class AttentionScope:
    """Attention inside takes `step`; for this thread."""

    def __init__(self, step: StepAttention) -> None:
        self._step = step

    def __enter__(self) -> StepAttention:
        _running.step = self._step
        return self._step

    def __exit__(self, *raised: object) -> None:
        _running.step = None


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """See `AttentionInterface`: query (1, heads, tokens, width), key and value alike."""
    step: StepAttention | None = getattr(_running, "step", None)
    if step is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    for unserved in ("s_aux", "position_bias"):
        if others.get(unserved) is not None:
            raise WrapError(
                f"model with {unserved} in its attention",
                "is not served by the engine",
                "use generate() of the library",
            )
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    step.seen.add(layer)
    out = _attend_paged(
        step.plans[layer],
        step.views[layer],
        query[0],
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        others.get("softcap"),
    )
    return out.unsqueeze(0), None


def _attend_paged(
    plan: AttentionPlan,
    views: Views,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """(tokens, heads, width), of query (heads, tokens, width) and key and value (tokens, ...)."""
    if not plan.reads_first:
        _put_both(plan, views, key, value)
    by_token, decodes = query.transpose(0, 1), plan.decodes
    if not plan.prefills:
        out = decodes.attend(views, by_token, key, value, scaling, softcap)
    else:
        heads, tokens, _ = query.shape
        out = query.new_empty(tokens, heads, value.shape[-1])
        if decodes.number:
            first = slice(decodes.number)
            out[first] = decodes.attend(
                views, by_token[first], key[first], value[first], scaling, softcap
            )
        for part in plan.prefills:
            got = _attend_prefill(part, views, query, key, value, scaling, softcap)
            out[part.begin : part.end] = got
    if plan.reads_first:
        _put_both(plan, views, key, value)
    return out


def _put_both(plan: AttentionPlan, views: Views, key: torch.Tensor, value: torch.Tensor) -> None:
    for cache, new in zip(views, (key, value), strict=True):
        plan.put(cache, new)


def _attend_prefill(
    part: Prefill,
    views: Views,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """(tokens of the part, heads, width); see `_attend_paged`."""
    k, v = key[part.begin : part.end], value[part.begin : part.end]
    if part.read is not None:
        keys, values = views
        k = torch.cat([keys.index_select(0, part.read), k])
        v = torch.cat([values.index_select(0, part.read), v])
    repeats = query.shape[0] // k.shape[1]
    k, v = (x.transpose(0, 1).repeat_interleave(repeats, 0).unsqueeze(0) for x in (k, v))
    q = query[:, part.begin : part.end].unsqueeze(0)
    got = scaled_attention(q, k, v, part.mask, part.mask is None, scaling, softcap)
    return got[0].transpose(0, 1)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """In a step the plan says who looks where; outside it is as ever."""
    return None if getattr(_running, "step", None) is not None else sdpa_mask(*args, **kwargs)


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
