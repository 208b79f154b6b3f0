"""Scaled dot product attention, and the masks that it takes."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def scaled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """(..., queries, width) of query and of key and value (..., keys, width).

    Args:
        query: to be scored.
        key: what it is scored with.
        value: what is summed.
        mask: added to scores; None for none.
        causal: each query sees no key behind its own; not together with `mask`.
        scaling: of scores; None for the width's inverse root.
        softcap: scores become softcap * tanh(score / softcap); None for none.
    """
    if query.device.type == "cpu" and query.dtype != torch.float32:
        # torch's CPU kernel takes several times as long for 16-bit numbers as for float32.
        wide = None if mask is None else mask.float()
        inputs = query.float(), key.float(), value.float()
        return scaled_attention(*inputs, wide, causal, scaling, softcap).to(query.dtype)
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
