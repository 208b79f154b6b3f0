"""The low-rank product on GPUs: a launch for the shrink of all rows and linears, and one for the
expand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....core.platform import Platform, release
from ....core.selection import ACCEPTED, Verdict
from ....linear.rows import name
from ..base import LowRankCall, LowRankConfig, LowRankKernel, check_tensors

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FIRST_TRITON = (3, 6)
#: Shared memory and registers were looked at for these.
_FIRST_CAPABILITY = (8, 0)


class TritonLowRank(LowRankKernel):
    """A row's bytes depend on the row and its adapter: tiles are the same for one row and many."""

    name = "triton"

    @classmethod
    def serves(cls, config: LowRankConfig, platform: Platform) -> Verdict:
        if platform.triton_version is None:
            return Verdict(False, "it needs triton, which is not installed")
        if release(platform.triton_version) < _FIRST_TRITON:
            return Verdict(False, f"it needs triton 3.6, {platform.triton_version} is installed")
        if config.dtype not in _DTYPES:
            served = ", ".join(map(name, _DTYPES))
            return Verdict(False, f"it multiplies {served}, the slots are {name(config.dtype)}")
        if platform.device_type == "cpu" and platform.interpreted:
            return ACCEPTED
        if platform.device_type != "cuda" or platform.capability is None:
            return Verdict(False, f"it runs on NVIDIA devices, the slots are on {platform}")
        if platform.capability < _FIRST_CAPABILITY:
            return Verdict(False, f"it needs sm_80 or later, the device is {platform}")
        return ACCEPTED

    def accepts(self, out: torch.Tensor, x: torch.Tensor) -> Verdict:
        return check_tensors("the triton kernels", out, x, _DTYPES)

    @classmethod
    def run(cls, calls: Sequence[LowRankCall]) -> list[torch.Tensor]:
        from .kernels import launch

        groups: dict[object, list[LowRankCall]] = {}
        for call in calls:
            stack = call.kernel.stack
            kind = (stack.a.dtype, stack.width, None if call.shrunk else id(call.source))
            groups.setdefault(kind, []).append(call)
        for alike in groups.values():
            launch(alike)
        return [call.out for call in calls]
