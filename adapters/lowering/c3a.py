"""C3A (arXiv 2407.19342): circular convolutions, block by block.

delta[m b + j, n b + i] = kernel[m, n, (i - j) mod b] / K
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...core.errors import AdapterMismatchError
from ..weights import LayerWeights
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class C3aSettings:
    """The settings of one module, after all patterns: b, the block size."""

    block_size: int


def shapes(settings: C3aSettings, base: BaseLinear) -> Shapes:
    """c3a_kernel `(N / b, K / b, b)`.

    Raises:
        AdapterMismatchError: b does not divide N and K.
    """
    size = settings.block_size
    if base.in_features % size or base.out_features % size:
        raise AdapterMismatchError(
            f"adapter on {base.name}",
            f"blocks of {size} do not divide {base.out_features} by {base.in_features}",
            "load it on the base model that it was trained on",
        )
    return {"c3a_kernel": (base.out_features // size, base.in_features // size, size)}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: C3aSettings, base: BaseLinear
) -> LayerWeights:
    """A delta, built from the kernel's own numbers, without a Fourier transform.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`, `shapes`.
    """
    kernel = checked(tensors, shapes(settings, base), base)["c3a_kernel"].float()
    index = torch.arange(settings.block_size)
    circulant = kernel[:, :, (index[None, :] - index[:, None]) % settings.block_size]
    delta = circulant.permute(0, 2, 1, 3).reshape(base.out_features, base.in_features)
    return LayerWeights(delta=delta / base.in_features)
