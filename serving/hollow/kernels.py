"""What stands in for matmuls while a model runs without weights."""

from __future__ import annotations

import torch

from ...core.quantized_activation import QuantizedActivation
from ...linear.contract import InputContract
from ...linear.experts.kernels.base import GroupedKernel
from ...linear.experts.pairs import Pairs
from ...linear.kernels.base import BaseKernel, LinearKernel

_NO_WEIGHTS = "a model without weights has none"


def picked(x: torch.Tensor, channels: int) -> torch.Tensor:
    """(..., channels): columns of `x` (..., K) in another order, as often as it takes.

    Every row follows from its own input alone, as in a linear, and no two neighbouring channels
    are the same.
    """
    columns = x.shape[-1]
    index = torch.arange(channels, device=x.device) * 7 + torch.arange(channels) // columns
    return x.index_select(-1, index % columns)


class _StandIn(BaseKernel):
    """What has no weights, whatever it stands in for."""

    name = "stand-in"

    @property
    def weight_bytes(self) -> int:
        return 0

    def dequantized(self) -> torch.Tensor:
        raise NotImplementedError(_NO_WEIGHTS)

    def bias(self) -> torch.Tensor | None:
        return None


class StandInLinear(_StandIn, LinearKernel):
    """Passes columns on in the place of a product.

    Args:
        in_features: K.
        out_features: N.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        self.contract = InputContract(key=None)
        self.in_features, self.out_features = in_features, out_features

    def apply(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return picked(x, self.out_features)


class StandInExperts(_StandIn, GroupedKernel):
    """Passes columns on in the place of grouped products.

    Args:
        experts: E.
        in_features: K.
        out_features: N.
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        self.contract = InputContract(key=None)
        self.experts = experts
        self.in_features, self.out_features = in_features, out_features

    def apply(
        self,
        x: torch.Tensor | QuantizedActivation,
        pairs: Pairs,
        consumer: str,
        *,
        by_token: bool,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        rows = x.index_select(0, pairs.token) if by_token else x
        return picked(rows, self.out_features)
