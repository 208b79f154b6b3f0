"""What a proof ends with, and how two results are compared."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...core.oracle import Semantics
from ...linear.probing import PROBE_ERRORS

__all__ = ["PROBE_ERRORS", "Finding", "all_same_bytes", "same_bytes"]


class Finding(NamedTuple):
    """What a probe found: semantics, or the reason why there are none."""

    semantics: Semantics | None
    reason: str = ""


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: equal to the bit, or both NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return torch.zeros(a.shape, dtype=torch.bool, device=a.device)
    return (_bits(a) == _bits(b)) | (a.isnan() & b.isnan())


def all_same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `same_bytes` holds everywhere, and shape and dtype are the same."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bits(a), _bits(b)) or bool(same_bytes(a, b).all())


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
