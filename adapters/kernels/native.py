"""The low-rank product in C: shrink and expand of all rows in one call, in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ...core import native
from ...core.native import LORA_DTYPES, LowRank, low_rank_call
from ...core.platform import Platform
from ...core.selection import ACCEPTED, Verdict
from ...linear.rows import as_rows, name, rows_of
from .base import LowRankCall, LowRankConfig, LowRankKernel, LowRankStack, check_tensors

#: The highest rank whose sums a thread keeps in its cache.
MAX_RANK = 1024
_DTYPES = tuple(LORA_DTYPES)


class NativeLowRank(LowRankKernel):
    """A row's bytes are the same in any batch, and on every instruction set.

    Raises:
        MemoryError: (of `run`) there is no memory for scratch buffers.
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

    @classmethod
    def run(cls, calls: Sequence[LowRankCall]) -> list[torch.Tensor]:
        # The tensors that addresses are taken of live here until the call ends.
        kept, packed = [], []
        for call in calls:
            kernel, source = call.kernel, call.source
            assert isinstance(kernel, NativeLowRank)
            rows = as_rows(source)
            if rows is None:
                source = source.contiguous()
                rows = rows_of(source)
            kept.append(source)
            packed.append(kernel._packed(call, source, rows.stride))
        first = calls[0]
        arguments = b"".join(packed), len(packed), first.out.shape[0], native.threads()
        if first.kernel._function(*arguments):
            names = ", ".join(call.kernel.stack.name for call in calls)
            raise MemoryError(f"low-rank product of {names}: no memory for scratch")
        return [call.out for call in calls]

    @classmethod
    def launcher(
        cls, kernels: Sequence[LowRankKernel], slots: Sequence[torch.Tensor]
    ) -> NativeLaunch:
        return NativeLaunch([k for k in kernels if isinstance(k, NativeLowRank)], slots)

    def _packed(self, call: LowRankCall, source: torch.Tensor, stride: int) -> bytes:
        out = call.out
        to = out.data_ptr(), out.dtype, out.stride(0)
        if call.shrunk:
            return low_rank_call(
                self._address, (0, torch.float32, 0), call.slots, to, shrunk=source.data_ptr()
            )
        return low_rank_call(
            self._address, (source.data_ptr(), source.dtype, stride), call.slots, to
        )


class NativeLaunch:
    """Adds the products of several linears of one batch.

    Args:
        kernels: of the linears.
        slots: int32 (R,) of each.
    """

    def __init__(self, kernels: Sequence[NativeLowRank], slots: Sequence[torch.Tensor]) -> None:
        # Addresses are taken of what is kept here.
        self._kernels = tuple(kernels)
        self._slots = tuple(slots)
        self._fixed = [
            (kernel._address, own.data_ptr(), own.shape[0])
            for kernel, own in zip(kernels, slots, strict=True)
        ]
        self._number = len(self._kernels)
        self._pack = native.low_rank_packer(self._number)
        self._function = kernels[0]._function

    def __call__(self, outs: Sequence[torch.Tensor], x: torch.Tensor) -> bool:
        """As `LowRankKernel.launcher` says."""
        x_dtype = LORA_DTYPES.get(x.dtype)
        if x_dtype is None or not x.is_contiguous():
            return False
        x_at, x_stride, numbers = x.data_ptr(), x.shape[-1], []
        for (stack, slots, requests), out in zip(self._fixed, outs, strict=True):
            out_dtype = LORA_DTYPES.get(out.dtype)
            if out_dtype is None or out.requires_grad or not out.is_contiguous():
                return False
            # In the order of struct bl_low_rank_call.
            numbers += (stack, x_at, x_dtype, x_stride, 0, slots, requests, 0)
            numbers += (out.data_ptr(), out_dtype, out.shape[1])
        rows = outs[0].shape[0]
        if self._function(self._pack(*numbers), self._number, rows, native.threads()):
            names = ", ".join(kernel.stack.name for kernel in self._kernels)
            raise MemoryError(f"low-rank product of {names}: no memory for scratch")
        return True
