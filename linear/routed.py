"""The linear that replaces a model's own: a base kernel, and a place for adapter branches."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import nn

from ..core.errors import BatchError
from ..core.quantized_activation import (
    QuantizedActivation,
    RawOutput,
    as_quantized_activation,
)
from . import ops
from .batch import Batch, FusionRules, TokenMask
from .hooks import global_hook_names, hook_names
from .kernels.base import LinearKernel
from .outputs import Shrink
from .parts import CHANGES_INPUT, READS_RAW


class RowLayout(StrEnum):
    """Where the rows of a batch lie in a layer's input; found by a recorded forward."""

    ROWS = "rows"
    FLAT = "flat"
    UNKNOWN = "unknown"


# Not frozen: there is one for every linear of every forward, and that would double its time.
@dataclass(eq=False, slots=True)
class BranchInput:
    """What a branch may read of a layer's input.

    Attributes:
        x: what reached the layer: the raw activation, or a producer's output.
        consumer: name of the layer.
        changed: (..., K), what the base was fed in its place; None where that was `x`.
    """

    x: torch.Tensor | QuantizedActivation
    consumer: str
    changed: torch.Tensor | None = None

    def raw(self) -> RawOutput:
        """The raw rows of the batch's adapters; other rows may be unwritten.

        Raises:
            RawConsumerError: there are only codes.
        """
        if isinstance(self.x, QuantizedActivation):
            return self.x.require_raw_rows(self.consumer)
        if self.x.dtype.itemsize == 1:
            as_quantized_activation(self.x, None, consumer=self.consumer)
        return RawOutput(self.x)

    def values(self) -> torch.Tensor:
        """`raw().values`."""
        x = self.x
        # The usual case, in every linear of every forward.
        if isinstance(x, torch.Tensor) and x.dtype.itemsize > 1:
            return x
        return self.raw().values

    def every_row(self) -> torch.Tensor:
        """(..., K): the raw activation, rows without an adapter included.

        Raises:
            RawConsumerError: there are only codes, or only the raw rows of some adapters.
        """
        if isinstance(self.x, QuantizedActivation):
            return self.x.require_raw(self.consumer)
        return self.values()

    def shrunk(self) -> torch.Tensor | None:
        """float32 (M, width): the shrunk rows, where the producer absorbed this layer's branch."""
        if isinstance(self.x, QuantizedActivation):
            return self.x.shrunk_for(self.consumer)
        return None


@dataclass(frozen=True, eq=False)
class BranchRows:
    """The rows of a batch as the branch of one place sees them.

    Attributes:
        slots: int32 (R,), the slot of each request; -1 for none, or for an adapter without a
            branch here.
        parts: all `Part`s of the batch's adapters here.
        batch: whose rows they are.
        index: of the place.
    """

    slots: torch.Tensor
    parts: int
    batch: Batch
    index: int

    @classmethod
    def at(cls, place: Place, batch: Batch) -> BranchRows:
        """The rows of a batch that names adapters, at `place`."""
        assert batch.slots is not None
        index = place.index
        found = batch.rows_at.get(index)
        if found is None:
            slots, parts = batch.slots_by_place[index], batch.plan.parts[index]
            found = batch.rows_at[index] = cls(slots, parts, batch, index)
        return found

    def of(self, slots: Container[int]) -> list[tuple[int, int]]:
        """(request, slot) for each request whose adapter lies in one of `slots`."""
        chosen = enumerate(self.batch.row_slots)
        return [(row, slot) for row, slot in chosen if slot in slots]


class Branch(Protocol):
    """What all live adapters add to one linear.

    Attributes:
        compact_raw: of a dual producer, take the raw rows of adapters alone, one after the other,
            and not in place.
    """

    compact_raw: bool

    def change_input(self, x: BranchInput, rows: BranchRows) -> torch.Tensor:
        """(..., K): what the base is fed; rows whose adapter changes nothing keep their bytes.

        Asked only where `rows.parts` has a part that changes the input.
        """
        ...

    def add(self, out: torch.Tensor, x: BranchInput, rows: BranchRows) -> torch.Tensor:
        """`out` (M, N) with the branch of each row's adapter.

        The M rows belong to the R requests of `rows` in turn.  Where no part reads the raw
        activation, `x.raw()` is not asked for: the layer's site stays fused.
        """
        ...

    def shrink_request(self, slots: torch.Tensor, rank: int) -> Shrink:
        """What a producer has to multiply the raw activation with, to absorb this branch.

        Asked only of a branch all of whose holders have a `shrink_rank`; `rank` is the highest.
        """
        ...


class Place(Protocol):
    """Whatever takes adapters: a linear, an embedding, a norm.

    Attributes:
        name: full name in the model.
        index: its row of `Batch.slots`, and its entry in plans.
        branch: what all live adapters do there; None before the first.
    """

    name: str
    index: int
    branch: Any


class BatchSource(Protocol):
    """Where a layer asks for the batch in flight, and tells of its changes."""

    def advance(self, reason: str) -> None:
        """Something changed that plans are made from."""
        ...

    rules: FusionRules

    def current_batch(self) -> Batch:
        """The batch of this context, or the base batch."""
        ...


def refuse_misfit(subject: str, layout: RowLayout, shape: torch.Size, batch: Batch) -> None:
    """Refuse an input of `shape` that does not hold the rows of `batch` as `layout` says.

    Raises:
        BatchError: it has another number of rows.
    """
    rows = batch.rows
    if rows is None:
        return
    if layout == RowLayout.FLAT:
        fits = rows > 0 and len(shape) == 2 and shape[0] % rows == 0
    else:
        fits = shape[0] == rows
    if not fits:
        raise BatchError(
            subject,
            f"its input has shape {tuple(shape)} but the batch names {rows} rows",
            "name one adapter (or None) for every row of the batch",
        )


class RoutedLinear(nn.Module):
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
        self.branch: Branch | None = None
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

    def run(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """The forward outside of a compiled graph."""
        batch = self._source.current_batch()
        if not batch.plan.branched[self.index]:
            return self.kernel.apply(x, self.name)
        return self._run_branched(x, batch)

    def _run_branched(self, x: torch.Tensor | QuantizedActivation, batch: Batch) -> torch.Tensor:
        assert self.branch is not None
        if self.row_layout != RowLayout.ROWS or x.shape[0] != batch.rows:
            self.refuse_misfit(x.shape, batch)
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

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"kernel={self.kernel.name}, key={self.kernel.contract.key}"
        )
