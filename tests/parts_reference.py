"""What the parts of a linear compute, eager and in float32: the definition of every kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from branchline.adapters.lowering.base import Effect
from branchline.adapters.weights import LayerWeights, RotationFactor


def apply_parts(
    x: torch.Tensor, base: Callable[[torch.Tensor], torch.Tensor], parts: LayerWeights
) -> torch.Tensor:
    """One linear with one adapter, for rows that all take it; see the formula of `weights`.

    Args:
        x: `(..., K)`, any float dtype; computed with in float32.
        base: the linear without the adapter, bias included: float32 `(..., K)` to `(..., N)`.
        parts: of the adapter, on the device of x.

    Returns:
        float32 `(..., N)`; rounding to the model's dtype, once, is the caller's.
    """
    x = x.float()
    fed = transformed_input(x, parts)
    y = base(fed).float() if parts.weight is None else fed @ parts.weight.float().T
    y = transformed_output(y, parts)
    if (product := parts.low_rank) is not None:
        y = y + product.scaling * ((x @ product.a.float().T) @ product.b.float().T)
    if parts.delta is not None:
        y = y + x @ parts.delta.float().T
    return y if parts.shift is None else y + parts.shift


def transformed_input(x: torch.Tensor, parts: LayerWeights) -> torch.Tensor:
    """What is fed to the base in the place of x; float32 `(..., K)`."""
    if parts.in_scale is not None:
        x = x * parts.in_scale
    for factor in parts.rotation:
        x = rotated(x, factor)
    return x


def rotated(x: torch.Tensor, factor: RotationFactor) -> torch.Tensor:
    """x times one factor of a rotation, of the input or the output; float32 `(..., K)`."""
    if factor.order is not None:
        x = x[..., factor.order]
    count, size, _ = factor.blocks.shape
    cut = x.unflatten(-1, (count, size))
    return torch.einsum("...cb,cbd->...cd", cut, factor.blocks).flatten(-2)


def transformed_output(y: torch.Tensor, parts: LayerWeights) -> torch.Tensor:
    """What becomes of the base's output before anything is added; float32 `(..., N)`."""
    if parts.gain is not None:
        y = y * parts.gain
    for factor in parts.output_rotation:
        y = rotated(y, factor)
    return y


def effect_of(weights: LayerWeights) -> Effect:
    """The effect of parts: never BYPASS or EDIT, which parts do not express."""
    if weights.changes_input:
        return Effect.INPUT
    return Effect.RAW if weights.reads_raw else Effect.OUTPUT
