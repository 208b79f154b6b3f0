"""Norms with weights of an adapter's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ..fusion.site import Site
from ..linear.branching import BatchSource, BranchRows, RowLayout
from ..linear.module_place import ModulePlace, RowBranch
from .weights import NormWeights

_Compute = Callable[[torch.Tensor], torch.Tensor]


class NormBranch(RowBranch):
    """The weights that the adapters in slots have of one norm.

    Args:
        place: the norm.
    """

    def __init__(self, place: NormPlace) -> None:
        self._place = place
        self._own: dict[int, tuple[_Compute, int]] = {}

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return sum(nbytes for _, nbytes in self._own.values())

    def write(self, slot: int, weights: NormWeights) -> None:
        """Fill a slot; nothing of what was there before is left."""
        own = self._place.vectors(weights)
        nbytes = sum(vector.nbytes for vector in own.values())
        self._own[slot] = (self._place.computing_with(own), nbytes)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._own.pop(slot, None)

    def fill(self, out: torch.Tensor, x: torch.Tensor, rows: BranchRows) -> None:
        """Write the norm of adapters' rows.

        Args:
            out: (R, ..., K), the norm's own, written in place.
            x: (R, ..., K), its input.
            rows: the batch's.
        """
        for row, slot in rows.of(self._own):
            compute, _ = self._own[slot]
            out[row] = compute(x[row])


class NormPlace(ModulePlace):
    """A norm of the model that takes adapters; see `ModulePlace`.

    Where its site computes it, the site asks for the rows of adapters, and the norm's forward is
    the site's as before.

    Args:
        name: full name in the model.
        index: after those of all linears.
        module: the norm.
        source: answers for the batch in flight.
        row_layout: of its input.
        site: computes it, where one does.
    """

    def __init__(
        self,
        name: str,
        index: int,
        module: nn.Module,
        source: BatchSource,
        row_layout: RowLayout,
        site: Site | None,
    ) -> None:
        super().__init__(name, index, module, source, row_layout)
        self._site = site

    def install(self) -> None:
        """Serve the norm's calls from now on."""
        if self._site is None:
            super().install()
        else:
            self._site.maker = self

    def uninstall(self) -> None:
        """Give the norm, or its site, back."""
        if self._site is None:
            super().uninstall()
        else:
            self._site.maker = None

    def vectors(self, weights: NormWeights) -> dict[str, torch.Tensor]:
        """An adapter's vectors as the norm keeps its own; what an adapter lacks is the norm's."""
        own = {
            name: vector
            for name, vector in self.module._parameters.items()
            if name in ("weight", "bias") and vector is not None
        }
        given = {"weight": weights.weight, "bias": weights.bias}
        return {
            name: vector.detach() if (new := given[name]) is None else new.to(vector, copy=True)
            for name, vector in own.items()
        }

    def computing_with(self, vectors: dict[str, torch.Tensor]) -> _Compute:
        """The norm with other weights: by its site's definition, else by its own forward.

        Args:
            vectors: "weight" and, where the norm has one, "bias": (K,).
        """
        if self._site is not None:
            # In the order of a site's inputs.
            return partial(_compute_raw, self._site, *vectors.values())
        twin = copy.copy(self.module)
        vars(twin)["_parameters"] = {**self.module._parameters, **vectors}
        vars(twin).pop("forward", None)
        return partial(type(self.module).forward, twin)


def _compute_raw(site: Site, *vectors_and_x: torch.Tensor) -> torch.Tensor:
    *vectors, x = vectors_and_x
    return site.compute_raw(x, *vectors)
