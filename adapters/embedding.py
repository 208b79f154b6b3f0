"""Embeddings with adapters: a low-rank change, rows of an adapter's own, or a table of its own."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from ..fusion.identify import PROBE_ERRORS, same_bytes
from ..linear.branching import BatchSource, BranchRows, RowLayout
from ..linear.module_place import ModulePlace, RowBranch
from .weights import EmbeddingWeights


class EmbeddingBranch(RowBranch):
    """What the adapters in slots do to one embedding.

    Args:
        factor: that the module multiplies what it looks up with.
        dtype: of the matrices; rows and tables take that of the embedding.
        table_dtype: of the embedding.
        device: of the embedding.
    """

    def __init__(
        self,
        factor: float,
        dtype: torch.dtype,
        table_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._factor = factor
        self._dtype = dtype
        self._table_dtype = table_dtype
        self._device = device
        # By slot: (A transposed (V, r), B (D, r), scaling); (ids, rows); a table.
        self._low_rank: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}
        self._tokens: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tables: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        tensors = [*self._tables.values()]
        for pair in (*self._low_rank.values(), *self._tokens.values()):
            tensors += [item for item in pair if isinstance(item, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)

    def write(self, slot: int, weights: EmbeddingWeights) -> None:
        """Fill a slot; nothing of what was there before is left."""
        self.clear(slot)
        if weights.low_rank is not None:
            a, b = (self._placed(m, self._dtype) for m in (weights.low_rank.a, weights.low_rank.b))
            self._low_rank[slot] = (a.T.contiguous(), b, weights.low_rank.scaling)
        if weights.token_ids is not None and weights.tokens is not None:
            ids = self._placed(weights.token_ids, torch.int64)
            self._tokens[slot] = (ids, self._placed(weights.tokens, self._table_dtype))
        if weights.weight is not None:
            self._tables[slot] = self._placed(weights.weight, self._table_dtype)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for kept in (self._low_rank, self._tokens, self._tables):
            kept.pop(slot, None)

    def fill(self, out: torch.Tensor, x: torch.Tensor, rows: BranchRows) -> None:
        """Write the embeddings of adapters' rows: float32 sums, rounded once.

        Args:
            out: (R, ..., D), the embedding's own, written in place.
            x: (R, ...), token ids.
            rows: the batch's.
        """
        held = self._low_rank.keys() | self._tokens.keys() | self._tables.keys()
        for row, slot in rows.of(held):
            out[row] = self._embedded(out[row], x[row], slot)

    def _embedded(self, own: torch.Tensor, ids: torch.Tensor, slot: int) -> torch.Tensor:
        out = own
        if slot in self._tables:
            out = F.embedding(ids, self._tables[slot]) * self._factor
        if slot in self._tokens:
            known, values = self._tokens[slot]
            at = torch.searchsorted(known, ids).clamp_(max=known.shape[0] - 1)
            out = torch.where((known[at] == ids).unsqueeze(-1), values[at] * self._factor, out)
        if slot in self._low_rank:
            a, b, scaling = self._low_rank[slot]
            # Autocast would round the product to half precision.
            with torch.autocast(own.device.type, enabled=False):
                change = F.embedding(ids, a).float() @ b.float().mT
            out = (out.float() + change * scaling * self._factor).to(own.dtype)
        return out

    def _placed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(self._device, dtype, copy=True)


class EmbeddingPlace(ModulePlace):
    """An embedding of the model that takes adapters; see `ModulePlace`.

    Args:
        name: full name in the model.
        index: after those of all linears.
        module: the embedding.
        source: answers for the batch in flight.
        row_layout: of its token ids.
        factor: as `lookup_factor` found it.
    """

    def __init__(
        self,
        name: str,
        index: int,
        module: nn.Embedding,
        source: BatchSource,
        row_layout: RowLayout,
        factor: float,
    ) -> None:
        super().__init__(name, index, module, source, row_layout)
        self._weight = module.weight
        self._factor = factor

    def made_like(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) for ids (...), unwritten."""
        # Of the ids: while tracing they are made up, and the table is not.
        return x.new_empty((*x.shape, self._weight.shape[1]), dtype=self._weight.dtype)

    def new_branch(self, dtype: torch.dtype) -> EmbeddingBranch:
        """An empty branch, whose matrices are kept in `dtype`."""
        table = self._weight
        return EmbeddingBranch(self._factor, dtype, table.dtype, table.device)


def lookup_factor(module: nn.Embedding) -> float | str:
    """The number by which `module` multiplies what it looks up, proved on probes; 1 for most.

    Returns:
        the number, or why the module is something else than a look-up times a number.
    """
    if module.max_norm is not None:
        return "it renormalises its own weight"
    if type(module).forward is nn.Embedding.forward:
        return 1.0
    weight = module.weight
    table = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
    table[0] = 1.0
    probe = copy.copy(module)
    probe.padding_idx = None
    vars(probe)["_parameters"] = {**module._parameters, "weight": table.to(weight)}
    ids = torch.arange(5, device=weight.device).unsqueeze(0)
    try:
        out = type(module).forward(probe, ids)
    except PROBE_ERRORS as error:
        return f"its forward fails on token ids alone: {type(error).__name__}"
    if not isinstance(out, torch.Tensor) or out.shape != (1, *table.shape):
        return "its forward is no look-up"
    factor = float(out[0, 0, 0])
    expected = (probe.weight * factor).unsqueeze(0)
    if out.dtype != weight.dtype or not bool(same_bytes(out, expected).all()):
        return "its forward is something else than a look-up times a number"
    return factor
