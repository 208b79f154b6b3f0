"""The layers that replace a model's own: a base kernel, and a place for adapter branches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ..core.quantized_activation import QuantizedActivation
from . import ops
from .batch import Batch, FusionRules, TokenMask
from .branching import BatchSource, Branch, BranchInput, BranchRows, RowLayout, refuse_misfit
from .hooks import global_hook_names, hook_names
from .kernels.base import BaseKernel, LinearKernel
from .parts import CHANGES_INPUT, READS_RAW
from .together import Together, joins_now

KernelT = TypeVar("KernelT", bound=BaseKernel)


class RoutedLayer(nn.Module, Generic[KernelT]):
    """Base weights of a model, and a place for adapter branches beside them.

    Args:
        name: full name in the model.
        index: position in the registry.
        kernel: the base multiplication.
        source: answers for the batch in flight.
        dtype: dtype of the activations it is fed.
        device: where its weights lie.
        original: the module it replaces.
    """

    def __init__(
        self,
        name: str,
        index: int,
        kernel: KernelT,
        source: BatchSource,
        dtype: torch.dtype,
        device: torch.device,
        original: nn.Module | None = None,
    ) -> None:
        super().__init__()
        # In a tuple, so that it does not become a child.
        self._original = (original,)
        self.dtype = dtype
        self.device = device
        self.name = name
        self.index = index
        self._source = source
        self._kernel = kernel
        self.weight_was_read = False
        self.branch: Any = None
        self.row_layout = RowLayout.ROWS
        self.handle = ops.register(self)

    @property
    def takes_branches(self) -> bool:
        """Whether an adapter can attach here: it must be known where the batch's rows lie."""
        return self.row_layout != RowLayout.UNKNOWN

    @property
    def original(self) -> nn.Module | None:
        """The module it replaces."""
        return self._original[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.kernel.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self.kernel.out_features

    @property
    def kernel(self) -> KernelT:
        """The base multiplication; setting another advances the epoch."""
        return self._kernel

    @kernel.setter
    def kernel(self, kernel: KernelT) -> None:
        self._kernel = kernel
        self._source.advance(f"the kernel of {self.name} changed")

    @property
    def rules(self) -> FusionRules:
        """What the model was wrapped with."""
        return self._source.rules

    def refuse_misfit(self, shape: torch.Size, batch: Batch) -> None:
        """Refuse an input of `shape` that does not hold the rows of `batch`.

        Raises:
            BatchError: it has another number of rows.
        """
        refuse_misfit(f"layer '{self.name}'", self.row_layout, shape, batch)

    def reads_raw(self) -> bool:
        """Whether something reads this layer's input raw in the batch in flight (I2)."""
        batch = self._source.current_batch()
        hooked = hook_names(self) or global_hook_names()
        plan, index = batch.plan, self.index
        branch = plan.branched[index] and bool(plan.parts[index] & READS_RAW)
        return branch or bool(hooked)

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"kernel={self.kernel.name}, key={self.kernel.contract.key}"
        )


class RoutedLinear(RoutedLayer[LinearKernel]):
    """A base linear with adapter branches, fed by raw activations or by a producer's codes.

    Args:
        name: full name in the model.
        index: position in the registry.
        kernel: the base multiplication.
        source: answers for the batch in flight.
        dtype: dtype of the activations it is fed.
        device: where its weights lie.
        original: the module it replaces.
    """

    branch: Branch | None

    def __init__(
        self,
        name: str,
        index: int,
        kernel: LinearKernel,
        source: BatchSource,
        dtype: torch.dtype,
        device: torch.device,
        original: nn.Module | None = None,
    ) -> None:
        super().__init__(name, index, kernel, source, dtype, device, original)
        #: Linears that are handed the same tensor, this one among them; empty where it is alone.
        self.siblings: tuple[RoutedLinear, ...] = ()

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
        batch = self._source.current_batch()
        if not batch.plan.branched[self.index]:
            return self._kernel.apply(input, self.name)
        if batch.packed:
            batch = batch.fitting(input.shape)
        known = batch.memo.together
        together = known.get(self.index)
        if together is None:
            together = known[self.index] = Together.of(self, batch)
        if together.layers and joins_now(input):
            return together.run(self, input, batch)
        return self._run_branched(input, batch)

    def check_rows(self, shape: torch.Size, batch: Batch) -> None:
        """As `refuse_misfit`, at next to no cost where the rows fit."""
        if self.row_layout != RowLayout.ROWS or shape[0] != batch.rows:
            self.refuse_misfit(shape, batch)

    def run(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """The forward inside of a compiled graph's op, which is a linear's own."""
        batch = self._source.current_batch()
        if not batch.plan.branched[self.index]:
            return self.kernel.apply(x, self.name)
        return self._run_branched(x, batch.fitting(x.shape) if batch.packed else batch)

    def _run_branched(self, x: torch.Tensor | QuantizedActivation, batch: Batch) -> torch.Tensor:
        assert self.branch is not None
        self.check_rows(x.shape, batch)
        if not x.shape[:-1].numel():
            # No row is there to be anybody's, as where a head is fed none of a step's tokens.
            return self.kernel.apply(x, self.name)
        rows = BranchRows.at(self, batch)
        source = BranchInput(x, self.name)
        if rows.parts & CHANGES_INPUT:
            x = self.branch.change_input(source, rows)
            source = replace(source, changed=x)
        out = self.kernel.apply(x, self.name)
        flat = out if out.dim() == 2 else out.reshape(-1, out.shape[-1])
        if batch.tokens is not None:
            return self._add_to_some(flat, source, rows, batch.tokens).view(out.shape)
        added = self.branch.add(flat, source, rows)
        # Where a branch wrote in place, `out` holds the result already.
        in_place = added.data_ptr() == out.data_ptr()
        return out if in_place else added.view(out.shape)

    def _add_to_some(
        self, out: torch.Tensor, x: BranchInput, rows: BranchRows, tokens: TokenMask
    ) -> torch.Tensor:
        assert self.branch is not None
        mask = tokens.mask(out.shape[0] // rows.slots.shape[0], out.device)
        # A branch may write in place.
        return torch.where(mask, self.branch.add(out.clone(), x, rows), out)
