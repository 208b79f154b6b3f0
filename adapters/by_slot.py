"""Parts that are multiplied for one request at a time: rotations and dense weights.

A product of one request's rows has a shape that no neighbour changes, so neither do its bytes.
"""

from __future__ import annotations

import torch

from .weights import RotationFactor

# Numbers of a weight that are widened to float32 at once: 16 MiB of them.
_WIDENED = 1 << 22


def rotated(x: torch.Tensor, factors: tuple[RotationFactor, ...]) -> torch.Tensor:
    """`x` through each factor in turn.

    Args:
        x: float32 (T, K).
        factors: as `LayerWeights.rotation`; their blocks on the device of `x`.

    Returns:
        float32 (T, K).
    """
    for factor in factors:
        ordered = x if factor.order is None else x[:, factor.order]
        count, size = factor.blocks.shape[:2]
        by_block = ordered.reshape(-1, count, size).transpose(0, 1)
        x = torch.bmm(by_block, factor.blocks).transpose(0, 1).reshape(x.shape)
    return x


def dense_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` in float32, of a weight that is stored in any floating-point dtype.

    Args:
        x: (T, K).
        weight: (N, K); widened piece by piece, so that no float32 copy of all of it is made.

    Returns:
        float32 (T, N).
    """
    wide = x.float()
    if weight.dtype == torch.float32:
        return wide @ weight.mT
    out = wide.new_empty(wide.shape[0], weight.shape[0])
    step = max(_WIDENED // max(weight.shape[1], 1), 1)
    for start in range(0, weight.shape[0], step):
        piece = weight[start : start + step].float()
        torch.mm(wide, piece.mT, out=out[:, start : start + step])
    return out
