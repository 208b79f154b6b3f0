"""Activated LoRA: from which token of a row on its adapter acts.

An activated adapter changes nothing before the tokens that call it, so that a prompt's keys and
values can be shared with the base model.  It acts from the start of their last occurrence on, and
on everything that is generated after it; a row without them is the base model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.errors import BatchError


class Invocations:
    """The rows of one batch, of which some wait for the tokens that call their adapter.

    Args:
        tokens: by row, the invocation tokens of its adapter; None for a row whose adapter always
            acts, or that has none.
    """

    def __init__(self, tokens: Sequence[tuple[int, ...] | None]) -> None:
        self._tokens = tuple(tokens)
        self._called = [False] * len(self._tokens)
        self._before: list[list[int]] = [[] for _ in self._tokens]
        self._active: list[int] | None = None
        self._length = 0
        self._mask: torch.Tensor | None = None

    def see(self, ids: torch.Tensor | None, *, continues: bool) -> None:
        """Look for the invocation tokens in what the model is called with next.

        Args:
            ids: (R, T) token ids; None where the model is fed embeddings.
            continues: the tokens follow those of the call before (its keys and values are kept).

        Raises:
            BatchError: there are no token ids, or of another number of rows.
        """
        if ids is None or ids.dim() != 2 or ids.shape[0] != len(self._tokens):
            shape = None if ids is None else tuple(ids.shape)
            raise BatchError(
                "a batch with an activated LoRA",
                f"has {len(self._tokens)} rows, the model is called with token ids {shape}",
                "pass input_ids of shape (rows, tokens), in which its invocation tokens are found",
            )
        if not continues:
            self._called = [False] * len(self._tokens)
            self._before = [[] for _ in self._tokens]
        length = ids.shape[1]
        active = []
        for row, (wanted, sequence) in enumerate(zip(self._tokens, ids.tolist(), strict=True)):
            if wanted is None or self._called[row]:
                active.append(length)
                continue
            # Tokens of the call may have come before; those were computed without the adapter.
            known = self._before[row] + sequence
            start = last_start(known, wanted)
            self._called[row] = start is not None
            self._before[row] = known[len(known) - len(wanted) + 1 :]
            active.append(0 if start is None else min(length, len(known) - start))
        self._active, self._length, self._mask = active, length, None

    def mask(self, tokens: int, device: torch.device) -> torch.Tensor:
        """bool (R * tokens, 1): whether an adapter acts on that token of that row.

        Raises:
            BatchError: `see` was not called, or for another number of tokens.
        """
        if self._active is None or tokens != self._length:
            raise BatchError(
                "a batch with an activated LoRA",
                f"{tokens} tokens a row reach a linear, {self._length} token ids were seen",
                "call the served model itself, not a part of it, and not a compiled graph of it",
            )
        if self._mask is None or self._mask.device != device:
            first = torch.tensor([tokens - count for count in self._active])
            mask = torch.arange(tokens) >= first.unsqueeze(1)
            self._mask = mask.reshape(-1, 1).to(device)
        return self._mask


def last_start(sequence: Sequence[int], wanted: tuple[int, ...]) -> int | None:
    """Where the last occurrence of `wanted` starts in `sequence`; None without one."""
    for start in range(len(sequence) - len(wanted), -1, -1):
        if tuple(sequence[start : start + len(wanted)]) == wanted:
            return start
    return None
