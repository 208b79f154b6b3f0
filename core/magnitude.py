"""The largest magnitude in each of many tensors: whether they are finite, zero, or out of range."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch

from . import native

_HALVES: dict[torch.dtype, Callable[[int], float]] = {
    torch.float16: lambda bits: struct.unpack("<e", bits.to_bytes(2, "little"))[0],
    torch.bfloat16: lambda bits: _word(bits << 16),
}


def _word(bits: int) -> float:
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]


_DECODE: dict[torch.dtype, Callable[[int], float]] = {torch.float32: _word, **_HALVES}


def magnitudes(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The largest |x| of each; 0 of an empty one, and NaN where there is a NaN.

    One pass over all of them where they lie on the CPU; in bits, so that nothing is rounded.

    Args:
        tensors: of any shapes and floating-point dtypes.
    """
    library = native.load()
    if library.available and all(_is_plain(tensor) for tensor in tensors):
        return _by_bits(library, tensors)
    return [_largest(tensor) for tensor in tensors]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _DECODE and tensor.device.type == "cpu" and tensor.is_contiguous()


def _by_bits(library: native.NativeLibrary, tensors: Sequence[torch.Tensor]) -> list[float]:
    table = (native.Magnitude * len(tensors))()
    for entry, tensor in zip(table, tensors, strict=True):
        entry.values, entry.bytes = tensor.data_ptr(), tensor.dtype.itemsize
        entry.count = tensor.numel()
    library.call("bl_magnitudes", table, len(tensors))
    return [_DECODE[t.dtype](entry.largest) for entry, t in zip(table, tensors, strict=True)]


def _largest(tensor: torch.Tensor) -> float:
    return tensor.detach().abs().amax().item() if tensor.numel() else 0.0
