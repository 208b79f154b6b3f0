"""What a low-rank kernel is, and the values that its choice is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.native import MATMULS
from ...core.platform import Platform
from ...core.selection import ACCEPTED, Verdict
from ...linear.rows import name

#: The most linears of one `LowRankKernel.run`.
MOST_CALLS = MATMULS


@dataclass(frozen=True)
class LowRankConfig:
    """Everything a kernel may be chosen by; plain data, so any machine can be imagined.

    Attributes:
        dtype: of the matrices.
        width: the highest rank that fits a slot.
    """

    dtype: torch.dtype
    width: int


@dataclass(frozen=True, eq=False)
class LowRankStack:
    """The matrices of one linear's adapters, those of all slots in two pools.

    Attributes:
        name: of the linear, for messages.
        a: (rows, K), contiguous.
        b: (rows, N), contiguous, of the same dtype: B transposed, row by row as in `a`.
        starts: int32 (slots,), the first row of each slot.
        ranks: int32 (slots,), how many rows of each slot count; others are not read.
        scaling: float32 (slots,).
        width: the highest rank that fits a slot.
    """

    name: str
    a: torch.Tensor
    b: torch.Tensor
    starts: torch.Tensor
    ranks: torch.Tensor
    scaling: torch.Tensor
    width: int


# Not frozen: there is one for every linear of every forward, and that would double its time.
@dataclass(eq=False, slots=True)
class LowRankCall:
    """What one linear adds to the rows of a batch.

    Attributes:
        kernel: of the linear.
        out: (M, N), the base output; may be written to.
        source: (..., K), the raw activation: M rows; or float32 (M, width), shrunk rows.
        slots: int32 (R,), contiguous, on the device of `out`, -1 for none; the M rows belong to R
            requests in turn.
        shrunk: `source` was multiplied with A already.
    """

    kernel: Any
    out: torch.Tensor
    source: torch.Tensor
    slots: torch.Tensor
    shrunk: bool = False


Launch = Callable[[Sequence[torch.Tensor], torch.Tensor], bool]


class LowRankKernel(ABC):
    """Adds to each row the product with the matrices of its own slot.

    The definition, in float32: ``out[m] + scaling[s] * ((x[m] @ a_s.T) @ b_s)`` with s the slot of
    row m, rounded once to the dtype of `out`.  Rows without a slot keep their bytes, and no row's
    bytes depend on another row.

    Attributes:
        name: as messages show it.
    """

    name: str

    def __init__(self, stack: LowRankStack) -> None:
        self.stack = stack

    @classmethod
    @abstractmethod
    def serves(cls, config: LowRankConfig, platform: Platform) -> Verdict:
        """Whether it runs on `platform` and multiplies matrices of this kind."""

    @abstractmethod
    def accepts(self, out: torch.Tensor, x: torch.Tensor) -> Verdict:
        """Whether it reads and writes these tensors: (M, N), and (..., K) or shrunk rows."""

    @classmethod
    @abstractmethod
    def run(cls, calls: Sequence[LowRankCall]) -> list[torch.Tensor]:
        """What several linears add to the same M rows, in as few launches as the device needs.

        A linear's bytes do not depend on the linears beside it.

        Args:
            calls: of kernels of this class, 1 to `MOST_CALLS`; each kernel accepts its tensors.

        Returns:
            (M, N) of each, in the dtype of its `out`; `out` itself where it was written to.
        """

    @classmethod
    def launcher(
        cls, kernels: Sequence[LowRankKernel], slots: Sequence[torch.Tensor]
    ) -> Launch | None:
        """`run` with all worked out before that stays the same in all forwards of a batch.

        Args:
            kernels: of this class, 1 to `MOST_CALLS`.
            slots: int32 (R,) of each, as in `LowRankCall`.

        Returns:
            What writes to the outputs (M, N) of all, in place, from the raw activation (..., K);
            False, and nothing written, where it does not take these tensors.  None where `run` has
            nothing to gain.
        """
        return None

    def add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`run` of one linear, from the raw activation (..., K)."""
        return self.run((LowRankCall(self, out, x, slots),))[0]

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`run` of one linear, from rows that were multiplied with A already."""
        return self.run((LowRankCall(self, out, shrunk, slots, True),))[0]


def check_tensors(
    kernels: str, out: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> Verdict:
    """Whether tensors are of `dtypes`, record no gradients, and `out` is written in place.

    Args:
        kernels: who asks, for the reason.
        out: what is written to.
        x: what is read.
        dtypes: those that are served.
    """
    if out.dtype not in dtypes or x.dtype not in dtypes:
        found = f"{name(x.dtype)} in and {name(out.dtype)} out"
        return Verdict(False, f"{kernels} take {', '.join(map(name, dtypes))}, not {found}")
    if out.requires_grad:
        return Verdict(False, f"{kernels} record no gradients")
    if out.dim() != 2 or (out.shape[1] > 1 and out.stride(1) != 1):
        layout = f"{tuple(out.shape)} with strides {out.stride()}"
        return Verdict(False, f"{kernels} write rows of neighbours, the output is {layout}")
    return ACCEPTED
