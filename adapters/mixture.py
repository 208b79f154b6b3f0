"""Several adapters for one row, each with a weight: their branches' weighted sum, never a merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import BatchError

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Mixture:
    """What one row takes in the place of one adapter's name.

    Attributes:
        weights: (name, weight), each name once.
    """

    weights: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Mixture:
        """From names and weights, such as ``{"sql": 0.7, "tone": 0.3}``.

        Raises:
            BatchError: no name, or a weight that is no finite number.
        """
        pairs: list[tuple[Any, Any]] = list(weights.items())
        for name, weight in pairs:
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not isinstance(name, str) or not number or not abs(weight) <= _LARGEST:
                raise BatchError(
                    f"mixture of {len(pairs)}",
                    f"its weight for {name!r} is no finite float32, or the name is no text",
                    "pass a mapping such as {'sql': 0.7, 'tone': 0.3}",
                )
        if not pairs:
            raise BatchError("a mixture", "names no adapter", "pass None for a base row")
        return cls(tuple((name, float(weight)) for name, weight in pairs))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapters in it."""
        return tuple(name for name, _ in self.weights)
