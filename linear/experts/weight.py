"""The weights of all experts of one projection, on a quantised grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.errors import ContractError
from ...core.scheme import PER_CHANNEL, WeightScheme
from ..quantized_weight import QuantizedWeight


@dataclass(frozen=True, eq=False)
class ExpertsWeight:
    """A weight (E, N, K) as codes, expert by expert.

    Attributes:
        experts: the weight of each, all of one scheme and shape.
    """

    experts: tuple[QuantizedWeight, ...]

    @classmethod
    def of(cls, experts: Sequence[QuantizedWeight], subject: str) -> ExpertsWeight:
        """Of one weight or more.

        Raises:
            ContractError: there is none, or their schemes or shapes differ.
        """
        kinds = {(w.scheme, w.out_features, w.in_features) for w in experts}
        if len(kinds) != 1:
            found = ", ".join(f"{s} ({n}, {k})" for s, n, k in sorted(kinds, key=str)) or "none"
            raise ContractError(
                subject,
                f"its experts' weights are not alike: {found}",
                "quantise all experts of a layer by one scheme",
            )
        return cls(tuple(experts))

    @classmethod
    def from_float(
        cls, weight: torch.Tensor, subject: str, scheme: WeightScheme = PER_CHANNEL
    ) -> ExpertsWeight:
        """Quantise a weight (E, N, K), each expert by itself.

        Args:
            weight: float16, bfloat16 or float32.
            subject: the layer, for messages.
            scheme: which elements share a scale.

        Raises:
            ScaleError: the weight holds NaN or infinities.
        """
        experts = (
            QuantizedWeight.from_float(own, f"expert {number} of {subject}", scheme)
            for number, own in enumerate(weight)
        )
        return cls.of(tuple(experts), subject)

    def __len__(self) -> int:
        return len(self.experts)

    @property
    def scheme(self) -> WeightScheme:
        """Of every expert."""
        return self.experts[0].scheme

    @property
    def out_features(self) -> int:
        """N."""
        return self.experts[0].out_features

    @property
    def in_features(self) -> int:
        """K."""
        return self.experts[0].in_features

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.experts[0].codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(weight.nbytes for weight in self.experts)

    def dequantize(self) -> torch.Tensor:
        """float32 (E, N, K)."""
        return torch.stack([weight.dequantize() for weight in self.experts])

    def codes(self) -> torch.Tensor:
        """(E, N, bytes), contiguous, a copy."""
        # As bytes: torch stacks no four-bit codes.
        first = self.experts[0].codes
        stacked = torch.stack([weight.codes.view(torch.uint8) for weight in self.experts])
        return stacked.view(first.dtype)

    def scales(self) -> torch.Tensor:
        """float32 (E, *scheme.scale_shape), global scales multiplied in, a copy."""
        return torch.stack([weight.scales() for weight in self.experts])
