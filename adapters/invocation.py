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
        self._history: list[list[int]] = [[] for _ in self._tokens]
        self._called = [False] * len(self._tokens)
        self._active: list[int] | None = None
        self._length = 0
        self._masks: dict[tuple[int, torch.device], torch.Tensor] = {}

    def see(self, ids: torch.Tensor | None, *, past: int = 0) -> None:
        """Look for the invocation tokens in what the model is called with next.

        Args:
            ids: (R, T) token ids; None where the model is fed embeddings.
            past: how many tokens came before, whose keys and values are kept; fewer than were
                seen where some were taken back.

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
        self._length = ids.shape[1]
        rows = enumerate(zip(self._tokens, ids.tolist(), strict=True))
        self._active = [
            self._follow(row, wanted, sequence, past) for row, (wanted, sequence) in rows
        ]
        self._masks = {}

    def _follow(
        self, row: int, wanted: tuple[int, ...] | None, sequence: list[int], past: int
    ) -> int:
        """On how many tokens at the end of `sequence` the adapter of a row acts."""
        if wanted is None:
            return len(sequence)
        history = self._history[row]
        if past < len(history):
            del history[past:]
            self._called[row] = last_start(history, wanted) is not None
        # What somebody else computed is not known; it calls nothing.
        history += [-1] * (past - len(history)) + sequence
        if self._called[row]:
            return len(sequence)
        # Tokens of the call may have come before; those were computed without the adapter.
        first = max(0, past - len(wanted) + 1)
        start = last_start(history[first:], wanted)
        self._called[row] = start is not None
        return 0 if start is None else min(len(sequence), len(history) - first - start)

    def mask(self, tokens: int, device: torch.device) -> torch.Tensor:
        """bool (R * tokens, 1): whether an adapter acts on that token of that row.

        Args:
            tokens: of each row; fewer than were seen are the last ones (a head is fed those).
            device: of the result.

        Raises:
            BatchError: `see` was not called, or for fewer tokens.
        """
        if self._active is None or tokens > self._length:
            raise BatchError(
                "a batch with an activated LoRA",
                f"{tokens} tokens a row reach a linear, {self._length} token ids were seen",
                "call the served model itself, not a part of it, and not a compiled graph of it",
            )
        mask = self._masks.get((tokens, device))
        if mask is None:
            first = torch.tensor([tokens - count for count in self._active])
            mask = (torch.arange(tokens) >= first.unsqueeze(1)).reshape(-1, 1).to(device)
            self._masks[tokens, device] = mask
        return mask


def last_start(sequence: Sequence[int], wanted: tuple[int, ...]) -> int | None:
    """Where the last occurrence of `wanted` starts in `sequence`; None without one."""
    for start in range(len(sequence) - len(wanted), -1, -1):
        if tuple(sequence[start : start + len(wanted)]) == wanted:
            return start
    return None
