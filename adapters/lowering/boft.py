"""BOFT (arXiv 2311.06243): the rotation is a product of sparse ones, as in a butterfly network.

    y = s * ((x R) @ W.T) + bias,   R = B_m ... B_2 B_1,   B_i = P_i diag(C_i1, ..., C_id) P_i^T

C_ij is Cayley's transform of the skew-symmetric part of a stored block.  P_i sorts the columns of
spans of 2^(i-1) blocks, half block by half block: first the even halves, then the odd ones.  So
block j of factor i combines halves that lie 2^(i-1) halves apart; P_1 changes nothing.

The stored tensor says how many factors there are: PEFT falls back to one where it cannot build its
CUDA extension, whatever the config says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...core.errors import AdapterFormatError, AdapterMismatchError
from ..weights import LayerWeights, RotationFactor
from .base import BaseLinear, Shapes, checked
from .oft import cayley


@dataclass(frozen=True)
class BoftSettings:
    """The settings of one module.

    Args:
        block_size: `boft_block_size`; 0 where the number is given.
        block_num: `boft_block_num`; 0 where the size is given.
        factors: m, the first size of the stored boft_R.
    """

    block_size: int = 4
    block_num: int = 0
    factors: int = 1


def shapes(settings: BoftSettings, base: BaseLinear) -> Shapes:
    """boft_R `(m, d, b, b)` with d b = K, boft_s `(N, 1)`.

    Raises:
        AdapterFormatError: not exactly one of block size and number is given.
        AdapterMismatchError: blocks, or their butterfly, do not divide K.
    """
    if (settings.block_size == 0) == (settings.block_num == 0):
        raise AdapterFormatError(
            f"adapter on {base.name}",
            f"boft_block_size is {settings.block_size} and boft_block_num {settings.block_num}; "
            "one of them must be 0",
            "save it with PEFT again",
        )
    given = settings.block_size or settings.block_num
    size, number = given, base.in_features // given
    if settings.block_num:
        size, number = number, size
    spans = 2 ** (settings.factors - 1)
    if size * number != base.in_features or number % spans or (spans > 1 and size % 2):
        raise AdapterMismatchError(
            f"adapter on {base.name}",
            f"{number} blocks of {size} in {settings.factors} butterfly factors do not divide its "
            f"{base.in_features} inputs",
            "load it on the base model that it was trained on",
        )
    return {"boft_R": (settings.factors, number, size, size), "boft_s": (base.out_features, 1)}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: BoftSettings, base: BaseLinear
) -> LayerWeights:
    """One rotation factor for each stored one, the last stored first; `boft_s` as gain and shift.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`, `shapes`.
        AdapterUnsupportedError: nothing tells whether the base has a bias.
    """
    given = checked(tensors, shapes(settings, base), base)
    stored = given["boft_R"].float()
    blocks = cayley(0.5 * (stored - stored.mT))
    half = stored.shape[-1] // 2
    rotation = []
    unsorted: torch.Tensor | None = None
    for index in reversed(range(settings.factors)):
        # x P lists the columns as they are sorted; P^T, before the next factor, puts them back.
        order = None if index == 0 else _butterfly(base.in_features, half, 2**index)
        rotation.append(RotationFactor(blocks[index], _then(unsorted, order)))
        unsorted = None if order is None else torch.argsort(order)
    gain = given["boft_s"].float().flatten()
    bias = base.float_bias("BOFT")
    shift = None if bias is None else (1 - gain) * bias
    return LayerWeights(gain=gain, shift=shift, rotation=tuple(rotation))


def _butterfly(columns: int, half: int, blocks: int) -> torch.Tensor:
    """The columns in the order in which factor i cuts them, int64 `(K,)`; 2^(i-1) = blocks."""
    halves = torch.arange(columns).reshape(-1, 2 * blocks, half)
    sorted_halves = torch.cat((halves[:, ::2], halves[:, 1::2]), dim=1)
    # Row n of P has its one in column sorted[n], so that x P has x[n] at sorted[n].
    return torch.argsort(sorted_halves.reshape(-1))


def _then(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first[second]
