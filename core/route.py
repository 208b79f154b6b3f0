"""Routes: what a site does in one batch."""

from __future__ import annotations

from enum import IntEnum


class Route(IntEnum):
    """How a site's output reaches its consumers.

    UNFUSED: the raw activation is written; each consumer quantises it itself.
    FUSED: one producer emits codes only.
    DUAL: one producer emits codes, and raw rows for the raw consumers.
    ABSORBED: one producer emits codes and the LoRA shrink; raw is never written.
    """

    UNFUSED = 0
    FUSED = 1
    DUAL = 2
    ABSORBED = 3

    def __str__(self) -> str:
        return self.name.lower()
