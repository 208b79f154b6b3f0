"""The low-rank kernels in order of preference, and the choice among them with reasons kept."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.platform import Platform
from ...core.selection import Rejection
from .base import LowRankConfig, LowRankKernel
from .eager import EagerLowRank
from .native import NativeLowRank
from .triton.low_rank import TritonLowRank

#: The first that serves is chosen; the last serves everything.
KERNELS: tuple[type[LowRankKernel], ...] = (NativeLowRank, TritonLowRank, EagerLowRank)


@dataclass(frozen=True)
class LowRankSelection:
    """The outcome of a choice.

    Attributes:
        kernel: the chosen class.
        rejected: candidates before it, each with its reason.
    """

    kernel: type[LowRankKernel]
    rejected: tuple[Rejection, ...] = ()


def select_low_rank(config: LowRankConfig, platform: Platform) -> LowRankSelection:
    """The first kernel that serves `config` on `platform`; pure."""
    rejected: list[Rejection] = []
    for kernel in KERNELS[:-1]:
        verdict = kernel.serves(config, platform)
        if verdict.ok:
            return LowRankSelection(kernel, tuple(rejected))
        rejected.append(Rejection(kernel.name, verdict.reason))
    return LowRankSelection(KERNELS[-1], tuple(rejected))
