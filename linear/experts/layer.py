"""One projection of all experts of a layer: a grouped kernel, and a place for adapter branches."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ...core.quantized_activation import QuantizedActivation
from ..branching import BatchSource, BranchInput
from ..outputs import Shrink
from ..routed import RoutedLayer
from .kernels.base import GroupedKernel
from .pairs import Pairs
from .rows import PairRows
from .shard import ExpertsShard


class PairBranch(Protocol):
    """What all live adapters add to one projection of experts."""

    #: Of a dual producer, take the raw rows of adapters alone, one after the other.
    compact_raw: bool

    def add(self, out: torch.Tensor, x: BranchInput, rows: PairRows, place: int) -> torch.Tensor:
        """`out` (P, N), by position, with the branch of each pair's adapter and expert.

        Args:
            out: the base output; may be written to.
            x: the rows that the pairs read, by position, (P, K): raw, or shrunk by their producer.
            rows: whose adapter each pair has.
            place: index of the projection.
        """
        ...

    def shrink_request(self, rows: PairRows, place: int, rank: int) -> Shrink:
        """What a producer multiplies the raw activation, (P, K), with, to absorb this branch."""
        ...


class ExpertsLinear(RoutedLayer[GroupedKernel]):
    """One projection (E, N, K) with adapter branches, fed raw or by a producer's codes.

    Args:
        name: full name in the model: of the experts, and of the projection.
        index: position in the registry.
        kernel: the base multiplication.
        source: answers for the batch in flight.
        dtype: dtype of the activations it is fed.
        device: where its weights lie.
        by_token: it is fed a row for each token, and not for each pair.
        original: the experts that it is a part of, as the model had them.
    """

    branch: PairBranch | None

    def __init__(
        self,
        name: str,
        index: int,
        kernel: GroupedKernel,
        source: BatchSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_token: bool,
        original: nn.Module | None = None,
    ) -> None:
        super().__init__(name, index, kernel, source, dtype, device, original)
        self.by_token = by_token
        #: Which experts are here, where others are on other ranks; None where all are.
        self.shard: ExpertsShard | None = None

    @property
    def experts(self) -> int:
        """E."""
        return self._kernel.experts

    @property
    def experts_name(self) -> str:
        """Full name of the experts that it is a projection of."""
        return self.name.rpartition(".")[0]

    # Positional and called as a module: hooks and calibration see it as they see a linear.
    def forward(self, input: torch.Tensor | QuantizedActivation, rows: PairRows) -> torch.Tensor:
        """(T, K) or (P, K) to (P, N), by position."""
        pairs, plan = rows.pairs, rows.batch.plan
        out = self._kernel.apply(input, pairs, self.name, by_token=self.by_token)
        if not plan.branched[self.index] or not len(pairs):
            return out
        assert self.branch is not None
        source = BranchInput(self._by_position(input, pairs), self.name)
        return self.branch.add(out, source, rows, self.index)

    def combine(self, out: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """float32 (T, N) of `out` (P, N), by position: weighted by choice and added up."""
        return self._kernel.combine(out, weights, pairs)

    def _by_position(
        self, x: torch.Tensor | QuantizedActivation, pairs: Pairs
    ) -> torch.Tensor | QuantizedActivation:
        if not self.by_token or isinstance(x, QuantizedActivation):
            return x
        return x[pairs.token]
