"""The linear that replaces a model's own: a base kernel, and a place for adapter branches."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import torch
from torch import nn

from ..core.errors import BatchError
from ..core.quantized_activation import QuantizedActivation
from . import ops
from .batch import Batch, FusionRules
from .hooks import global_hook_names, hook_names
from .kernels.base import LinearKernel


class RowLayout(StrEnum):
    """Where the rows of a batch lie in a layer's input; found by a recorded forward."""

    ROWS = "rows"
    FLAT = "flat"
    UNKNOWN = "unknown"


class Branch(Protocol):
    """What all live adapters add to one linear."""

    def add(
        self,
        out: torch.Tensor,
        raw: Callable[[], torch.Tensor],
        slots: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """`out` (rows, ..., N) plus each masked row's branch.

        `raw()` is the raw activation (rows, ..., K).  Who never asks for it, because it acts on
        the output alone, leaves the layer's site fused.
        """
        ...


class BatchSource(Protocol):
    """Where a layer asks for the batch in flight, and tells of its changes."""

    def advance(self, reason: str) -> None:
        """Something changed that plans are made from."""
        ...

    rules: FusionRules

    def current_batch(self) -> Batch:
        """The batch of this context, or the base batch."""
        ...


class RoutedLinear(nn.Module):
    """A base linear with adapter branches, fed by raw activations or by a producer's codes.

    Args:
        name: full name in the model.
        index: position in the registry.
        kernel: the base multiplication.
        source: answers for the batch in flight.
        dtype: dtype of the activations it is fed.
        device: where its weights lie.
    """

    def __init__(
        self,
        name: str,
        index: int,
        kernel: LinearKernel,
        source: BatchSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.device = device
        self.name = name
        self.index = index
        self._source = source
        self._kernel = kernel
        self.weight_was_read = False
        self.branch: Branch | None = None
        self.row_layout = RowLayout.ROWS
        self.handle = ops.register(self)

    @property
    def takes_branches(self) -> bool:
        """Whether an adapter can attach here: it must be known where the batch's rows lie."""
        return self.row_layout != RowLayout.UNKNOWN

    @property
    def in_features(self) -> int:
        """K."""
        return self.kernel.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self.kernel.out_features

    @property
    def kernel(self) -> LinearKernel:
        """The base multiplication; setting another advances the epoch."""
        return self._kernel

    @kernel.setter
    def kernel(self, kernel: LinearKernel) -> None:
        self._kernel = kernel
        self._source.advance(f"the kernel of {self.name} changed")

    @property
    def weight(self) -> torch.Tensor:
        """The model's own weight where it is kept, else a stand-in of its shape and dtype.

        Some model code asks a linear for its weight's dtype; whoever computed with the stand-in
        would get an error of torch's, for it lies on the meta device.
        """
        self.weight_was_read = True
        own = self.kernel.float_weight()
        if own is not None:
            return own
        shape = (self.out_features, self.in_features)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, (N,), or None."""
        return self.kernel.bias()

    # The parameter is called what it is in nn.Linear, for callers that name it.
    def forward(self, input: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """(..., K) to (..., N): the base linear and the branches of this batch's rows."""
        if torch.compiler.is_compiling():
            return ops.routed_linear(input, self.handle, self.out_features)
        return self.run(input)

    @property
    def rules(self) -> FusionRules:
        """What the model was wrapped with."""
        return self._source.rules

    def reads_raw(self) -> bool:
        """Whether something reads this layer's input raw in the batch in flight (I2)."""
        batch = self._source.current_batch()
        hooked = hook_names(self) or global_hook_names()
        return batch.plan.branched[self.index] or bool(hooked)

    def current_routes(self) -> tuple[int, ...]:
        """Route by site index, of the batch in flight."""
        return self._source.current_batch().plan.routes

    def run(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """The forward outside of a compiled graph."""
        batch = self._source.current_batch()
        out = self.kernel.apply(x, self.name)
        if not batch.plan.branched[self.index]:
            return out
        return self._add_branch(out, x, batch)

    def _add_branch(
        self, out: torch.Tensor, x: torch.Tensor | QuantizedActivation, batch: Batch
    ) -> torch.Tensor:
        assert self.branch is not None
        assert batch.slots is not None
        assert batch.masks is not None
        rows = batch.slots.shape[0]
        if not self._fits(x.shape, rows):
            raise BatchError(
                f"layer '{self.name}'",
                f"its input has shape {tuple(x.shape)} but the batch names {rows} rows",
                "name one adapter (or None) for every row of the batch",
            )
        flat = self.row_layout == RowLayout.FLAT

        def raw() -> torch.Tensor:
            own = x.require_raw(self.name) if isinstance(x, QuantizedActivation) else x
            return own.unflatten(0, (rows, -1)) if flat else own

        by_row = out.unflatten(0, (rows, -1)) if flat else out
        added = self.branch.add(by_row, raw, batch.slots, batch.masks[self.index])
        return added.flatten(0, 1) if flat else added

    def _fits(self, shape: torch.Size, rows: int) -> bool:
        if self.row_layout == RowLayout.FLAT:
            return rows > 0 and len(shape) == 2 and shape[0] % rows == 0
        return shape[0] == rows

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"kernel={self.kernel.name}, key={self.kernel.contract.key}"
        )
