"""Linears that are handed one tensor: base after base, and all of their branches in one go.

Whoever of them is called first computes for all; the others find their outputs ready.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ..core.quantized_activation import QuantizedActivation
from .batch import Batch
from .branching import BranchRows, JointAdd
from .parts import Part

if TYPE_CHECKING:
    from .routed import RoutedLinear


class Together:
    """One site's linears in one batch that asks each of them for plain products only.

    Args:
        layers: the linears; none where the one that was asked for is computed by itself.
        add: adds the branches of all of them.
    """

    __slots__ = ("_add", "_first", "layers")

    def __init__(self, layers: tuple[RoutedLinear, ...] = (), add: JointAdd | None = None) -> None:
        self.layers = layers
        self._add = add
        self._first = layers[0].index if layers else 0

    @classmethod
    def of(cls, layer: RoutedLinear, batch: Batch) -> Together:
        """Who is computed with `layer` in `batch`; the same object for all of them."""
        if not _joins(layer, batch):
            return cls()
        siblings = [other for other in layer.siblings if _joins(other, batch)]
        for other in siblings:
            found = batch.memo.together.get(other.index)
            if found is not None and layer in found.layers:
                return found
        layers = tuple(siblings) if layer in siblings else (layer,)
        branches = [one.branch for one in layers]
        rows = [BranchRows.at(one, batch) for one in layers]
        first = branches[0]
        join = None if first is None else first.join
        return cls() if join is None else cls(layers, join(branches, rows))

    def run(
        self, layer: RoutedLinear, x: torch.Tensor | QuantizedActivation, batch: Batch
    ) -> torch.Tensor:
        """The output of `layer`, which is one of them, for `x` (..., K)."""
        ready = batch.ready.get(self._first)
        if ready is not None:
            out = ready.taken(layer.index, x)
            if out is not None:
                return out
        layer.check_rows(x.shape, batch)
        outs = [one.kernel.apply(x, one.name) for one in self.layers]
        flat = [out if out.dim() == 2 else out.view(-1, out.shape[-1]) for out in outs]
        assert self._add is not None
        added = self._add(flat, x)
        # A branch that wrote in place hands back what it was given.
        whole = [
            out if sum_ is base else sum_.view(out.shape)
            for out, base, sum_ in zip(outs, flat, added, strict=True)
        ]
        if len(whole) == 1:
            return whole[0]
        by_index = {one.index: out for one, out in zip(self.layers, whole, strict=True)}
        own = by_index.pop(layer.index)
        batch.ready[self._first] = _Ready(x, by_index)
        return own


class _Ready:
    """Outputs of linears that were computed before they were called.

    Args:
        x: what they were computed from.
        outs: by the index of the linear.
    """

    __slots__ = ("_outs", "_version", "_x")

    def __init__(
        self, x: torch.Tensor | QuantizedActivation, outs: dict[int, torch.Tensor]
    ) -> None:
        self._x = weakref.ref(x)
        self._version = _version(x)
        self._outs = outs

    def taken(self, index: int, x: torch.Tensor | QuantizedActivation) -> torch.Tensor | None:
        """The output of one, once, if `x` is still what it was computed from."""
        if self._x() is not x or self._version != _version(x):
            return None
        return self._outs.pop(index, None)


def _version(x: torch.Tensor | QuantizedActivation) -> int:
    """Changes with every write to `x`, except where torch does not count them (inference mode)."""
    counted = isinstance(x, torch.Tensor) and not x.is_inference()
    return x._version if counted else 0


def _joins(layer: RoutedLinear, batch: Batch) -> bool:
    """Whether all that the branch of `layer` does in `batch` is one product a row."""
    plan, index = batch.plan, layer.index
    plain = plan.branched[index] and plan.parts[index] == Part.PLAIN
    alone = bool(batch.mixed) or batch.tokens is not None
    return plain and not alone and layer.branch is not None
