"""Calls of the C kernels that see to pairs: the same bytes as `pairs.py` defines."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...core import native
from ...core.native import LORA_DTYPES, Combine, SortedPairs
from ..outputs import empty

_INDEX_DTYPES = (torch.int64, torch.int32)


class Sorted(NamedTuple):
    """What `Pairs` holds, and how many choices name no expert here."""

    order: torch.Tensor
    token: torch.Tensor
    position: torch.Tensor
    expert: torch.Tensor
    offsets: torch.Tensor
    absent: int


def sorts(index: torch.Tensor) -> bool:
    """Whether the C kernels are there and read such choices."""
    on_cpu = index.device.type == "cpu" and index.dtype in _INDEX_DTYPES
    return on_cpu and native.load().available


def sort_pairs(index: torch.Tensor, experts: int) -> Sorted:
    """The choices (T, k) by expert, those of experts outside [0, `experts`) last, as `experts`.

    Raises:
        MemoryError: there is no memory for scratch buffers.
    """
    index = index.contiguous()
    number, cpu = index.numel(), index.device
    order, token, position = (empty((number,), torch.int64, cpu) for _ in range(3))
    expert = empty((number,), torch.int32, cpu)
    offsets = empty((experts + 1,), torch.int32, cpu)
    tokens, top_k = index.shape
    call = SortedPairs(
        index.data_ptr(),
        index.element_size(),
        tokens,
        top_k,
        experts,
        order.data_ptr(),
        token.data_ptr(),
        position.data_ptr(),
        expert.data_ptr(),
        offsets.data_ptr(),
    )
    native.load().call("bl_pairs", call)
    return Sorted(order, token, position, expert, offsets, call.absent)


def combines(out: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether the C kernels are there and add up such rows."""
    known = out.dtype in LORA_DTYPES and weights.dtype in LORA_DTYPES
    on_cpu = out.device.type == "cpu" and weights.device.type == "cpu"
    return known and on_cpu and native.load().available


def combine(
    out: torch.Tensor, weights: torch.Tensor, position: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """float32 (T, N): `out` (P, N), by position, weighted and added up.

    Args:
        out: rows from ``offsets[-1]`` on are taken for zeros and not read.
        weights: (T, k).
        position: int64 (P,), contiguous: of each pair.
        offsets: int32 (E + 1,), contiguous.
    """
    out, weights = out.contiguous(), weights.contiguous()
    tokens, top_k = weights.shape
    total = empty((tokens, out.shape[1]), torch.float32, out.device)
    call = Combine(
        tokens,
        top_k,
        out.shape[1],
        out.data_ptr(),
        LORA_DTYPES[out.dtype],
        weights.data_ptr(),
        LORA_DTYPES[weights.dtype],
        position.data_ptr(),
        offsets.data_ptr() + offsets.element_size() * (offsets.shape[0] - 1),
        total.data_ptr(),
    )
    native.load().call("bl_combine", call, native.threads())
    return total
