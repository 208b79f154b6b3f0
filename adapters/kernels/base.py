"""What a low-rank kernel is, and the values that its choice is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ...core.platform import Platform
from ...core.selection import ACCEPTED, Verdict
from ...linear.rows import name


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

    @abstractmethod
    def add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The rows with their adapters.

        Args:
            out: (M, N), the base output; may be written to.
            x: (..., K), the raw activation: M rows.
            slots: int32 (R,) on the device of `out`, -1 for none; the M rows belong to R requests
                in turn.

        Returns:
            (M, N) in the dtype of `out`; `out` itself where it was written to.
        """

    @abstractmethod
    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """As `add`, from float32 (M, width) rows that were multiplied with A already."""


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
