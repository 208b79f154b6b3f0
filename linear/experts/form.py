"""How the experts of a layer compute, and how their weights lie."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertsForm:
    """How a layer's experts compute, and how their weights lie.

    Attributes:
        experts: E.
        hidden: H, columns of what they are fed and of what they return.
        intermediate: I, columns of the activation between the two projections.
        gated: the first projection has 2 * I channels, gates and ups.
        interleaved: gates and ups take turns, and are not one half each.
        transposed: weights lie as (E, K, N), and not as (E, N, K).
        has_bias: both projections add one.
        post_norm: their output goes through a norm before it is weighted.
    """

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    interleaved: bool = False
    transposed: bool = False
    has_bias: bool = False
    post_norm: bool = False

    @property
    def up_name(self) -> str:
        """Of the first projection."""
        return "gate_up_proj" if self.gated else "up_proj"

    @property
    def down_name(self) -> str:
        """Of the second projection."""
        return "down_proj"

    @property
    def up_features(self) -> int:
        """N of the first projection."""
        return self.intermediate * (2 if self.gated else 1)

    def shape(self, projection: str) -> tuple[int, int, int]:
        """(E, N, K) of a projection, however it is stored."""
        if projection == self.down_name:
            return self.experts, self.hidden, self.intermediate
        return self.experts, self.up_features, self.hidden
