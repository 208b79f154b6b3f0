"""Norms by definition.

Sums are float64: rounded to float32 they do not show the order of the additions.  RMSNorm squares
in float32 (exact for BF16 and FP16, but for over- and underflow, which are the model's own);
LayerNorm takes the mean first and then the squares of what is left, both in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import ConfigError

#: Rounding orders; the last two are LayerNorms.
NORM_ORDERS = ("llama", "gemma", "layer_norm", "layer_norm_1p")


@dataclass(frozen=True)
class NormSemantics:
    """What a norm site computes.

    Attributes:
        order: with ``n = x / rms``: "llama" is ``weight * round(n)``, "gemma" is
            ``round(n * (1 + weight))``, all in float32.  With ``n = (x - mean) / std``:
            "layer_norm" is ``round(n * weight + bias)``; "layer_norm_1p" the same with
            ``round(1 + weight)`` as weight.
        eps: added to the mean of squares, or to the variance.
        bias: a bias is among the inputs.
        residual: a residual is among the inputs; ``round(x + residual)`` is normed, and returned.
    """

    order: str
    eps: float
    bias: bool = False
    residual: bool = False

    def __post_init__(self) -> None:
        if self.order not in NORM_ORDERS or (self.bias and not self.centered):
            raise ConfigError(
                f"norm order {self.order!r}{' with a bias' if self.bias else ''}",
                "has no definition here",
                f"use one of {', '.join(NORM_ORDERS)}; only a LayerNorm has a bias",
            )

    @property
    def centered(self) -> bool:
        """Whether it is a LayerNorm, which subtracts the mean."""
        return self.order.startswith("layer_norm")

    @property
    def family(self) -> str:
        """The name without parameters: what producers are registered for."""
        if self.centered:
            return "layer_norm[1p]" if self.order == "layer_norm_1p" else "layer_norm"
        return f"rms_norm[{self.order}]"

    def __str__(self) -> str:
        return f"add_{self.family}" if self.residual else self.family


class NormInputs(NamedTuple):
    """The inputs of a norm by name; None for what its semantics do not have."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None


def name_inputs(semantics: NormSemantics, inputs: tuple[torch.Tensor, ...]) -> NormInputs:
    """(x, [residual,] weight, [bias]) by name."""
    rest = list(inputs)
    return NormInputs(
        rest.pop(0),
        rest.pop(0) if semantics.residual else None,
        rest.pop(0),
        rest.pop(0) if semantics.bias else None,
    )


class Normed(NamedTuple):
    """What a norm returns: its output and, where it adds one, the new residual."""

    out: torch.Tensor
    residual: torch.Tensor | None


def norm(semantics: NormSemantics, inputs: tuple[torch.Tensor, ...]) -> Normed:
    """A norm at its rounding boundary.

    Args:
        semantics: rounding order, epsilon, and which inputs there are.
        inputs: x (..., K), [residual (..., K),] weight (K,), [bias (K,)], all of one dtype:
            float16, bfloat16 or float32.

    Returns:
        (..., K) in the dtype of x, and the new residual of the same kind.
    """
    x, residual, weight, bias = name_inputs(semantics, inputs)
    if residual is not None:
        x = residual = (x.float() + residual.float()).to(x.dtype)
    out = scale_rows(semantics, x, statistics(semantics, x), weight, bias)
    return Normed(out, residual)


class RowStatistics(NamedTuple):
    """Of each row, float32 (..., 1): the mean (0 for RMSNorm) and ``1 / sqrt(spread + eps)``."""

    mean: torch.Tensor
    inverse: torch.Tensor


def statistics(semantics: NormSemantics, x: torch.Tensor) -> RowStatistics:
    """The first half of a norm, for x (..., K)."""
    columns = x.shape[-1]
    if semantics.centered:
        wide = x.double()
        mean = wide.sum(-1, keepdim=True) / columns
        spread = ((wide - mean).square().sum(-1, keepdim=True) / columns).float()
        centre = mean.float()
    else:
        squares = x.float().square().double()
        spread = squares.sum(-1, keepdim=True).float() / columns
        centre = torch.zeros_like(spread)
    # By way of float64: torch's float32 root on a CPU is now and then one unit off.
    root = (spread + semantics.eps).double().sqrt().float()
    return RowStatistics(centre, 1.0 / root)


def scale_rows(
    semantics: NormSemantics,
    x: torch.Tensor,
    rows: RowStatistics,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The second half of a norm: `x` in the order of `semantics`, in the dtype of `x`."""
    if semantics.centered:
        gain = (weight + 1).float() if semantics.order == "layer_norm_1p" else weight.float()
        scaled = (x.float() - rows.mean) * rows.inverse * gain
        return (scaled if bias is None else scaled + bias.float()).to(x.dtype)
    normed = x.float() * rows.inverse
    if semantics.order == "gemma":
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return (weight.float() * normed.to(x.dtype).float()).to(x.dtype)
