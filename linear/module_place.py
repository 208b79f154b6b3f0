"""Modules that are no linears and yet take adapters: an embedding, or a norm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import ops
from .batch import Batch
from .branching import BatchSource, BranchRows, RowLayout, refuse_misfit


class RowBranch(ABC):
    """What all live adapters do to the output of one such module.

    An adapter's rows are computed request by request: a row's bytes depend on its own request.
    """

    @abstractmethod
    def fill(self, out: torch.Tensor, x: torch.Tensor, rows: BranchRows) -> None:
        """Write the rows of the batch's adapters.

        Args:
            out: (R, ...), what the module makes of `x`, by request; written in place.
            x: (R, ...), its input by request.
            rows: the batch's.
        """


class ModulePlace:
    """One such module; its forward is replaced on the object, all else of it stays as it is.

    Args:
        name: full name in the model.
        index: after those of all linears.
        module: takes one tensor, in which the rows of the batch lie as `row_layout` says.
        source: answers for the batch in flight.
        row_layout: not UNKNOWN.
    """

    def __init__(
        self,
        name: str,
        index: int,
        module: nn.Module,
        source: BatchSource,
        row_layout: RowLayout,
    ) -> None:
        self.name = name
        self.index = index
        self.module = module
        self.row_layout = row_layout
        self.branch: RowBranch | None = None
        self._source = source
        self._forward: Callable[[torch.Tensor], Any] = module.forward
        # Of one that is split over ranks, what exchanges its parts.
        self._replaced = vars(module).get("forward")
        self.handle = ops.register(self)

    def install(self) -> None:
        """Serve the module's calls from now on."""
        vars(self.module)["forward"] = self

    def uninstall(self) -> None:
        """Give the module its own forward back."""
        vars(self.module).pop("forward", None)
        if self._replaced is not None:
            vars(self.module)["forward"] = self._replaced

    def made_like(self, x: torch.Tensor) -> torch.Tensor:
        """Room for the module's output of `x`, unwritten: what a compiled graph knows of it."""
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    # The parameter is called what it is in nn.Embedding, for callers that name it.
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """The module's forward, with the branches of this batch's rows."""
        if torch.compiler.is_compiling():
            return ops.routed_module(input, self.handle)
        return self.run(input)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The forward outside of a compiled graph."""
        return self.filled(self._forward(x), x, self._source.current_batch())

    def filled(self, out: torch.Tensor, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`out`, made of `x` by the module, with the rows of this batch's adapters written anew.

        Raises:
            BatchError: `x` has another number of rows than the batch.
        """
        if not batch.plan.branched[self.index]:
            return out
        assert self.branch is not None
        assert batch.rows is not None
        subject, rows = f"module '{self.name}'", BranchRows.at(self, batch)
        if batch.packed:
            leading = out.dim() - 1
            refuse_misfit(subject, self.row_layout, out.shape, batch)
            by_token = x.reshape(batch.rows, *x.shape[leading:])
            self.branch.fill(out.view(batch.rows, out.shape[-1]), by_token, rows)
            return out
        refuse_misfit(subject, self.row_layout, x.shape, batch)
        requests = (batch.rows, -1)
        self.branch.fill(out.unflatten(0, requests), x.unflatten(0, requests), rows)
        return out
