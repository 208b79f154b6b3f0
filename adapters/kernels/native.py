"""The low-rank product in C: shrink and expand of all rows in one call, in place."""

from __future__ import annotations

import ctypes

import torch

from ...core import native
from ...core.native import LORA_DTYPES, LowRank, LowRankRows
from ...core.platform import Platform
from ...core.selection import ACCEPTED, Verdict
from ...linear.rows import as_rows, name, rows_of
from .base import LowRankConfig, LowRankKernel, LowRankStack, check_tensors

#: The highest rank whose sums a thread keeps in its cache.
MAX_RANK = 1024
_DTYPES = tuple(LORA_DTYPES)


class NativeLowRank(LowRankKernel):
    """A row's bytes are the same in any batch, and on every instruction set.

    Raises:
        MemoryError: (of `add` and `expand`) there is no memory for scratch buffers.
    """

    name = "native"

    def __init__(self, stack: LowRankStack) -> None:
        super().__init__(stack)
        functions = native.load().functions
        assert functions is not None, "built without serves()"
        self._function = functions.bl_low_rank
        # Addresses never change: the pools are written in place.
        self._stack = LowRank(
            stack.a.data_ptr(),
            stack.b.data_ptr(),
            LORA_DTYPES[stack.a.dtype],
            stack.starts.data_ptr(),
            stack.ranks.data_ptr(),
            stack.scaling.data_ptr(),
            stack.a.shape[1],
            stack.b.shape[1],
            stack.width,
        )
        self._address = ctypes.addressof(self._stack)

    @classmethod
    def serves(cls, config: LowRankConfig, platform: Platform) -> Verdict:
        if platform.device_type != "cpu":
            return Verdict(False, f"the C kernels run on a CPU, the slots are on {platform}")
        if platform.native_isa is None:
            return Verdict(False, f"the C kernels are absent: {platform.native_reason}")
        if config.dtype not in LORA_DTYPES:
            served = ", ".join(map(name, LORA_DTYPES))
            reason = f"the C kernels multiply {served} matrices, the slots are {name(config.dtype)}"
            return Verdict(False, reason)
        if config.width > MAX_RANK:
            return Verdict(False, f"the C kernels multiply ranks to {MAX_RANK}, not {config.width}")
        return ACCEPTED

    def accepts(self, out: torch.Tensor, x: torch.Tensor) -> Verdict:
        known = x.dtype in LORA_DTYPES and out.dtype in LORA_DTYPES
        if known and out.dim() == 2 and out.is_contiguous() and not out.requires_grad:
            return ACCEPTED
        return check_tensors("the C kernels", out, x, _DTYPES)

    def add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        rows = as_rows(x)
        if rows is None:
            x = x.contiguous()
            rows = rows_of(x)
        call = LowRankRows(
            x.data_ptr(),
            LORA_DTYPES[x.dtype],
            rows.stride,
            None,
            slots.data_ptr(),
            slots.shape[0],
            None,
            out.data_ptr(),
            LORA_DTYPES[out.dtype],
            out.stride(0),
        )
        self._run(call, rows.number)
        return out

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        shrunk = shrunk.contiguous()
        call = LowRankRows(
            None,
            LORA_DTYPES[torch.float32],
            0,
            shrunk.data_ptr(),
            slots.data_ptr(),
            slots.shape[0],
            None,
            out.data_ptr(),
            LORA_DTYPES[out.dtype],
            out.stride(0),
        )
        self._run(call, out.shape[0])
        return out

    def _run(self, call: LowRankRows, rows: int) -> None:
        if self._function(self._address, ctypes.addressof(call), rows, native.threads()):
            raise MemoryError(f"low-rank product of {self.stack.name}: no memory for scratch")
