"""The low-rank product on GPUs: a launch for the shrink of all rows, and one for the expand."""

from __future__ import annotations

import torch

from ....core.platform import Platform, release
from ....core.selection import ACCEPTED, Verdict
from ....linear.outputs import empty
from ....linear.rows import as_rows, name, rows_of
from ..base import LowRankConfig, LowRankKernel, check_tensors

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

    def add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        from .kernels import launch_shrink

        if as_rows(x) is None:
            x = x.contiguous()
        rows = rows_of(x)
        # What no slot's rank reaches is neither written nor read.
        shrunk = empty((rows.number, self.stack.width), torch.float32, x.device)
        launch_shrink(x, rows, self.stack, slots, shrunk)
        return self.expand(out, shrunk, slots)

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        from .kernels import launch_expand

        launch_expand(shrunk.contiguous(), self.stack, slots, out)
        return out
