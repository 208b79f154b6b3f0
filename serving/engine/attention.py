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
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...core.errors import WrapError

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
        write: int64 (tokens,): where the keys and values of the step's tokens go.
        decodes: how many sequences have one token; they come first in the step.
        read: int64 (decodes, longest): where keys and values lie, the rest points at zeros.
        lengths: int64 (decodes,): keys before the new one.
        mask: (decodes, 1, 1, longest) added to scores: 0 or -inf; None where all are as long.
        prefills: the other sequences.
        reads_first: the new keys may overwrite those that are read (a window's ring).
    """

    write: torch.Tensor
    decodes: int
    read: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None
    prefills: tuple[Prefill, ...]
    reads_first: bool


@dataclass(frozen=True, eq=False)
class StepAttention:
    """What a step's attention layers take.

    Attributes:
        views: keys and values of the cache by layer, each (places, heads, head width).
        plans: by layer.
        seen: layers that were asked, to notice a model that does not ask.
    """

    views: dict[int, tuple[torch.Tensor, torch.Tensor]]
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
    views: tuple[torch.Tensor, torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """(tokens, heads, width), of query (heads, tokens, width) and key and value (tokens, ...)."""
    keys, values = views
    if not plan.reads_first:
        keys.index_copy_(0, plan.write, key)
        values.index_copy_(0, plan.write, value)
    heads, tokens, width = query.shape
    out = query.new_empty(tokens, heads, value.shape[-1])
    if plan.decodes:
        k, v = (_gather(plan, cache, new) for cache, new in ((keys, key), (values, value)))
        grouped = (
            query[:, : plan.decodes].transpose(0, 1).reshape(plan.decodes, key.shape[1], -1, width)
        )
        got = _scaled(grouped, k, v, plan.mask, False, scaling, softcap)
        out[: plan.decodes] = got.reshape(plan.decodes, heads, -1)
    for part in plan.prefills:
        k, v = key[part.begin : part.end], value[part.begin : part.end]
        if part.read is not None:
            k = torch.cat([keys.index_select(0, part.read), k])
            v = torch.cat([values.index_select(0, part.read), v])
        repeats = heads // k.shape[1]
        k, v = (x.transpose(0, 1).repeat_interleave(repeats, 0).unsqueeze(0) for x in (k, v))
        q = query[:, part.begin : part.end].unsqueeze(0)
        got = _scaled(q, k, v, part.mask, part.mask is None, scaling, softcap)
        out[part.begin : part.end] = got[0].transpose(0, 1)
    if plan.reads_first:
        keys.index_copy_(0, plan.write, key)
        values.index_copy_(0, plan.write, value)
    return out


def _gather(plan: AttentionPlan, cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """(decodes, heads, longest, width): what sequences of one new token look back on."""
    rows, longest = plan.read.shape
    found = cache.index_select(0, plan.read.view(-1)).view(rows, longest, *cache.shape[1:])
    if plan.reads_first:
        found[torch.arange(rows, device=found.device), plan.lengths] = new[:rows]
    return found.transpose(1, 2)


def _scaled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    if query.device.type == "cpu" and query.dtype != torch.float32:
        # torch's CPU kernel takes several times as long for 16-bit numbers as for float32.
        wide = None if mask is None else mask.float()
        found = _scaled(query.float(), key.float(), value.float(), wide, causal, scaling, softcap)
        return found.to(query.dtype)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    if causal:
        mask = causal_mask(query.shape[-2], key.shape[-2], None, scores.dtype, scores.device)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores.float(), -1).to(value.dtype) @ value


def causal_mask(
    tokens: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(tokens, keys), added to scores: 0 where the last `tokens` of `keys` may look, else -inf.

    Args:
        tokens: that look.
        keys: that they look at, themselves included.
        window: how many keys each may look at, itself included; None for all.
        dtype: of the scores.
        device: of the scores.
    """
    at = torch.arange(keys - tokens, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    hidden = key > at
    if window is not None:
        hidden |= key <= at - window
    return torch.zeros(tokens, keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """In a step the plan says who looks where; outside it is as ever."""
    return None if getattr(_running, "step", None) is not None else sdpa_mask(*args, **kwargs)


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
