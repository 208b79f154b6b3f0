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
from .hooks import global_hook_names, hook_names
from .kernels.base import LinearKernel
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
        siblings: list[RoutedLinear] = []
        # A hook may write to what the next of them is handed.
        if not global_hook_names() and not any(map(hook_names, layer.siblings)):
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
            out = ready.taken(layer, x)
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
        outs_of = {
            one.index: (one.kernel, out) for one, out in zip(self.layers, whole, strict=True)
        }
        _, own = outs_of.pop(layer.index)
        batch.ready[self._first] = _Ready(x, outs_of)
        return own


class _Ready:
    """Outputs of linears that were computed before they were called.

    Args:
        x: what they were computed from.
        outs: by the index of the linear, with the kernel that made it.
    """

    __slots__ = ("_inference", "_outs", "_version", "_x")

    def __init__(
        self,
        x: torch.Tensor | QuantizedActivation,
        outs: dict[int, tuple[LinearKernel, torch.Tensor]],
    ) -> None:
        # Of an input that is gone nobody asks for more.
        self._x = weakref.ref(x, lambda _: outs.clear())
        self._version = _version(x)
        self._inference = torch.is_inference_mode_enabled()
        self._outs = outs

    def taken(
        self, layer: RoutedLinear, x: torch.Tensor | QuantizedActivation
    ) -> torch.Tensor | None:
        """The output of one, once, if it is what `layer` would make of `x` now."""
        if self._x() is not x or self._version != _version(x):
            return None
        kernel, out = self._outs.pop(layer.index, (None, None))
        same_mode = self._inference == torch.is_inference_mode_enabled()
        return out if kernel is layer.kernel and same_mode else None


def joins_now(x: torch.Tensor | QuantizedActivation) -> bool:
    """Whether outputs of `x` may be kept ready in the modes that torch is in.

    Not where gradients are recorded or autocast chooses dtypes, which may end before the next
    linear is called; nor of tensors whose writes torch does not count (inference mode).
    """
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    return not (isinstance(x, torch.Tensor) and x.is_inference())


def _version(x: torch.Tensor | QuantizedActivation) -> int:
    """Changes with every write to `x`; what a producer made is written by nobody."""
    return x._version if isinstance(x, torch.Tensor) else 0


def _joins(layer: RoutedLinear, batch: Batch) -> bool:
    """Whether all that the branch of `layer` does in `batch` is one product a row."""
    plan, index = batch.plan, layer.index
    plain = plan.branched[index] and plan.parts[index] == Part.PLAIN
    alone = bool(batch.mixed) or batch.tokens is not None
    return plain and not alone and layer.branch is not None
