"""The weights of all experts in one piece, as grouped kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....core.scheme import WeightScheme
from ...quantized_weight import QuantizedWeight
from ..weight import ExpertsWeight


@dataclass(frozen=True, eq=False)
class StackedWeight:
    """Codes and scales of E experts, one after the other; of schemes without a global scale.

    Attributes:
        codes: float8_e4m3fn (E, N, K), contiguous.
        scale: float32 (E, *scheme.scale_shape), contiguous.
        scheme: of every expert.
        scale_dtype: in which the scales came.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    scheme: WeightScheme
    scale_dtype: torch.dtype

    @classmethod
    def of(cls, weight: ExpertsWeight) -> StackedWeight:
        """A copy of `weight`."""
        scale_dtype = weight.experts[0].scale.dtype
        return cls(weight.codes(), weight.scales().contiguous(), weight.scheme, scale_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def weight(self) -> ExpertsWeight:
        """What it was made of, to the bit; codes, and scales that came as float32, are views."""
        columns = self.codes.shape[2]
        # A scale in one byte is a power of two, and is one again.
        scales = self.scale.to(self.scale_dtype)
        return ExpertsWeight(
            tuple(
                QuantizedWeight(codes, scale, self.scheme, columns)
                for codes, scale in zip(self.codes, scales, strict=True)
            )
        )
