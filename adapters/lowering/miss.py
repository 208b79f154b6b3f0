"""MiSS (arXiv 2409.15371): the input's blocks are summed before one small matrix.

    y = base(x) + (sum over blocks of r inputs) @ miss_block,   miss_block (r, N)

so a low-rank part whose a only adds: `a[i, k] = 1` where `k mod r = i`.  With `mini`, miss_block
has `mini_r` columns, repeated side by side.  With `bat` the change is `W B + B` by blocks, and PEFT
multiplies with the changed weight instead of the base: refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ...core.errors import AdapterMismatchError, AdapterUnsupportedError
from ..weights import LayerWeights, LowRank
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class MissSettings:
    """The settings of one module, after all patterns.

    Args:
        rank: r.
        variant: `init_weights`, where that is "bat" or "mini"; else "miss".
        mini_r: the stored columns of "mini".
    """

    rank: int
    variant: Literal["miss", "mini", "bat"] = "miss"
    mini_r: int = 1


def shapes(settings: MissSettings, base: BaseLinear) -> Shapes:
    """miss_block `(r, N)`, `(r, mini_r)` with "mini".

    Raises:
        AdapterUnsupportedError: "bat".
        AdapterMismatchError: r or mini_r does not fit K or N.
    """
    subject = f"adapter on {base.name}"
    if settings.variant == "bat":
        raise AdapterUnsupportedError(
            subject,
            "is MiSS with init_weights 'bat', which multiplies with the changed base weight in "
            "the base's place",
            "train it with init_weights true or 'mini'",
        )
    columns = settings.mini_r if settings.variant == "mini" else base.out_features
    if settings.rank > base.in_features or base.out_features % columns:
        raise AdapterMismatchError(
            subject,
            f"r {settings.rank} and {columns} columns do not fit {base.in_features} inputs and "
            f"{base.out_features} outputs",
            "load it on the base model that it was trained on",
        )
    return {"miss_block": (settings.rank, columns)}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: MissSettings, base: BaseLinear
) -> LayerWeights:
    """A low-rank part of rank r.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`, `shapes`.
    """
    block = checked(tensors, shapes(settings, base), base)["miss_block"]
    residues = torch.arange(base.in_features) % settings.rank
    a = (residues == torch.arange(settings.rank)[:, None]).to(block.dtype)
    b = block.repeat(1, base.out_features // block.shape[1]).T.contiguous()
    return LayerWeights(low_rank=LowRank(a, b, 1.0))
