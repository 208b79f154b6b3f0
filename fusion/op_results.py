"""What the public custom ops return: plain tensors by name."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Quantized(NamedTuple):
    """Codes with their scale."""

    codes: torch.Tensor
    scale: torch.Tensor


class DualQuantized(NamedTuple):
    """Codes with their scale, and raw rows (..., K) in place: zeros where not asked for."""

    codes: torch.Tensor
    scale: torch.Tensor
    raw: torch.Tensor


class AbsorbedQuantized(NamedTuple):
    """Codes with their scale, and float32 (M, width) shrunk rows for each consumer."""

    codes: torch.Tensor
    scale: torch.Tensor
    shrunk: list[torch.Tensor]


class NormQuantized(NamedTuple):
    """Codes with their scale, and the new residual (..., K); (0,) where there is none."""

    codes: torch.Tensor
    scale: torch.Tensor
    residual: torch.Tensor


class NormDualQuantized(NamedTuple):
    """`DualQuantized` with the new residual."""

    codes: torch.Tensor
    scale: torch.Tensor
    raw: torch.Tensor
    residual: torch.Tensor


class NormAbsorbedQuantized(NamedTuple):
    """`AbsorbedQuantized` with the new residual."""

    codes: torch.Tensor
    scale: torch.Tensor
    shrunk: list[torch.Tensor]
    residual: torch.Tensor
