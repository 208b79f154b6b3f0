"""The C kernels: a plain shared library built by the install, loaded with ctypes.

Without it (no compiler at install time) everything still works through eager code, and the audit
shows the slower choice with `NativeLibrary.reason`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError

ABI_VERSION = 16
ISA_VARIABLE = "BRANCHLINE_NATIVE_ISA"
#: enum bl_isa, by number.
ISAS = ("scalar", "avx2", "avx512", "amx")

_PTR, _I64, _INT, _F64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double


class ActivationKind(IntEnum):
    """enum bl_activation_kind."""

    IDENTITY = 0
    RELU = 1
    RELU2 = 2
    SILU = 3
    TABLE = 4


class NormOrder(IntEnum):
    """enum bl_norm_order."""

    LLAMA = 0
    GEMMA = 1
    LAYER_NORM = 2
    LAYER_NORM_1P = 3


class Epilogue(IntEnum):
    """enum bl_epilogue."""

    NO_CODES = 0
    STATIC = 1
    TOKEN = 2
    GROUP = 3
    NVFP4 = 4


class InputKind(IntEnum):
    """enum bl_input_kind."""

    E4M3 = 0
    BF16 = 1
    F32 = 2


class WeightKind(IntEnum):
    """enum bl_weight_kind."""

    E4M3 = 0
    BF16 = 1


#: BL_PANEL: output channels that a packed weight keeps together.
PANEL = 64
#: BL_MATMULS: the most matmuls of one call.
MATMULS = 8

#: enum bl_scale_dtype and enum bl_lora_dtype.
SCALE_DTYPES = {torch.float32: 0, torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 2}
LORA_DTYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}


class ActivationSource(ctypes.Structure):
    """struct bl_activation_source."""

    _fields_ = (
        ("kind", _I64),
        ("gate", _PTR),
        ("gate_stride", _I64),
        ("up", _PTR),
        ("up_stride", _I64),
        ("table", _PTR),
        ("code_table", _PTR),
        ("up_limit", _F64),
        ("up_offset", _F64),
    )


class NormSource(ctypes.Structure):
    """struct bl_norm_source."""

    _fields_ = (
        ("order", _I64),
        ("eps", _F64),
        ("x", _PTR),
        ("x_stride", _I64),
        ("residual", _PTR),
        ("residual_stride", _I64),
        ("weight", _PTR),
        ("bias", _PTR),
        ("new_residual", _PTR),
        ("new_residual_stride", _I64),
    )


class ShrinkOutput(ctypes.Structure):
    """struct bl_shrink."""

    _fields_ = (
        ("a", _PTR),
        ("a_dtype", _I64),
        ("row_stride", _I64),
        ("starts", _PTR),
        ("ranks", _PTR),
        ("slots", _PTR),
        ("width", _I64),
        ("out", _PTR),
        ("out_stride", _I64),
    )


class Output(ctypes.Structure):
    """struct bl_output."""

    _fields_ = (
        ("epilogue", _I64),
        ("group", _I64),
        ("ue8m0", _I64),
        ("scale_dtype", _I64),
        ("inv_scale", _F64),
        ("global_scale", _F64),
        ("codes", _PTR),
        ("codes_stride", _I64),
        ("code_rows", _I64),
        ("scale", _PTR),
        ("scale_row_stride", _I64),
        ("scale_group_stride", _I64),
        ("scale_rows", _I64),
        ("scale_groups", _I64),
        ("swizzled", _I64),
        ("raw", _PTR),
        ("raw_stride", _I64),
        ("raw_map", _PTR),
        ("shrinks", ctypes.POINTER(ShrinkOutput)),
        ("shrink_count", _I64),
        ("requests", _I64),
    )


class Matmul(ctypes.Structure):
    """struct bl_matmul."""

    _fields_ = (
        ("rows", _I64),
        ("columns", _I64),
        ("out_features", _I64),
        ("x", _PTR),
        ("x_kind", _I64),
        ("x_stride", _I64),
        ("x_rows", _PTR),
        ("x_scale", _PTR),
        ("x_scale_stride", _I64),
        ("x_group", _I64),
        ("weight", _PTR),
        ("weight_kind", _I64),
        ("weight_scale", _PTR),
        ("weight_group", _I64),
        ("weight_each_channel", _I64),
        ("block", _I64),
        ("bias", _PTR),
        ("out", _PTR),
        ("out_bf16", _I64),
        ("out_stride", _I64),
    )


@functools.cache
def matmul_packer(number: int) -> Callable[..., bytes]:
    """Packs the fields of an array of `number` struct bl_matmul, one after the other.

    Packing takes a fraction of the time of ctypes structures, and there is a call for every linear.
    """
    return struct.Struct(f"{len(Matmul._fields_) * number}q").pack


class GroupedMatmul(ctypes.Structure):
    """struct bl_grouped_matmul."""

    _fields_ = (
        ("each", Matmul),
        ("experts", _I64),
        ("offsets", _PTR),
        ("weight_bytes", _I64),
        ("weight_scale_stride", _I64),
        ("bias_stride", _I64),
    )


class SortedPairs(ctypes.Structure):
    """struct bl_pairs."""

    _fields_ = (
        ("index", _PTR),
        ("index_bytes", _I64),
        ("tokens", _I64),
        ("top_k", _I64),
        ("experts", _I64),
        ("order", _PTR),
        ("token", _PTR),
        ("position", _PTR),
        ("expert", _PTR),
        ("offsets", _PTR),
        ("absent", _I64),
    )


class Combine(ctypes.Structure):
    """struct bl_combine."""

    _fields_ = (
        ("tokens", _I64),
        ("top_k", _I64),
        ("columns", _I64),
        ("x", _PTR),
        ("x_dtype", _I64),
        ("weight", _PTR),
        ("weight_dtype", _I64),
        ("position", _PTR),
        ("computed", _PTR),
        ("out", _PTR),
    )


class LowRank(ctypes.Structure):
    """struct bl_low_rank."""

    _fields_ = (
        ("a", _PTR),
        ("b", _PTR),
        ("dtype", _I64),
        ("starts", _PTR),
        ("ranks", _PTR),
        ("scaling", _PTR),
        ("columns", _I64),
        ("channels", _I64),
        ("width", _I64),
    )


#: Fields of struct bl_low_rank_call, all of eight bytes.
LOW_RANK_FIELDS = 11


@functools.cache
def low_rank_packer(number: int) -> Callable[..., bytes]:
    """Packs the fields of an array of `number` struct bl_low_rank_call, one after the other.

    Packing takes a fraction of the time of ctypes structures, and there is a call for every site of
    every forward.
    """
    return struct.Struct(f"{LOW_RANK_FIELDS * number}q").pack


def low_rank_call(
    stack: int,
    x: tuple[int, torch.dtype, int],
    slots: torch.Tensor,
    out: tuple[int, torch.dtype, int],
    *,
    shrunk: int = 0,
    product: int = 0,
) -> bytes:
    """One struct bl_low_rank_call of an array.

    Args:
        stack: address of the `LowRank`.
        x: address, dtype and row stride of the activation.
        slots: int32 (R,), contiguous.
        out: address, dtype and row stride of the output.
        shrunk: address of rows that were multiplied with A already.
        product: address for the rows that are multiplied with A, where nothing else is wanted.
    """
    (x_at, x_dtype, x_stride), (out_at, out_dtype, out_stride) = x, out
    return low_rank_packer(1)(
        stack,
        x_at,
        LORA_DTYPES[x_dtype],
        x_stride,
        shrunk,
        slots.data_ptr(),
        slots.shape[0],
        product,
        out_at,
        LORA_DTYPES[out_dtype],
        out_stride,
    )


#: Packs the fields of struct bl_attention, in their order.
pack_attention = struct.Struct("25q2d").pack


class Magnitude(ctypes.Structure):
    """struct bl_magnitude."""

    _fields_ = (
        ("values", _PTR),
        ("bytes", _I64),
        ("count", _I64),
        ("largest", _I64),
    )


_OUTPUT = ctypes.POINTER(Output)
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "bl_activation": ([ctypes.POINTER(ActivationSource), _OUTPUT, _I64, _I64, _INT], _INT),
    "bl_norm": ([ctypes.POINTER(NormSource), _OUTPUT, _I64, _I64, _INT], _INT),
    "bl_matmul": ([ctypes.c_char_p, _I64, _INT], _INT),
    "bl_low_rank": ([ctypes.c_char_p, _I64, _I64, _INT], _INT),
    "bl_magnitudes": ([_PTR, _I64], None),
    "bl_grouped_matmul": ([ctypes.POINTER(GroupedMatmul), _INT], _INT),
    "bl_pairs": ([ctypes.POINTER(SortedPairs)], _INT),
    "bl_combine": ([ctypes.POINTER(Combine), _INT], None),
    "bl_attention": ([ctypes.c_char_p, _INT], _INT),
    "bl_let_workers_go": ([], None),
    "bl_fp8_decode": ([_PTR, _I64, _PTR, _I64, _I64, _I64, _INT], None),
}


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library, or the reason why there is none.

    Attributes:
        isa: instruction set in use; empty where the library is absent.
        reason: why it is absent; empty where it is loaded.
        functions: the ctypes handle.
    """

    isa: str
    reason: str
    functions: ctypes.CDLL | None

    @property
    def available(self) -> bool:
        """Whether the C kernels can be called."""
        return self.functions is not None

    def call(self, name: str, *arguments: object) -> None:
        """Call one kernel; the argument order is that of native/branchline_native.h.

        Raises:
            MemoryError: there was none for a scratch buffer.
        """
        assert self.functions is not None, self.reason
        if getattr(self.functions, name)(*arguments):
            raise MemoryError(f"{name}: no memory for a scratch buffer")


@functools.cache
def load() -> NativeLibrary:
    """The C kernels of this installation, on the widest instruction set the processor has.

    BRANCHLINE_NATIVE_ISA in the environment (scalar, avx2, avx512, amx, none) chooses another.

    Raises:
        ConfigError: the variable names an instruction set that is unknown or not there.
    """
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted == "none":
        return NativeLibrary("", f"switched off by {ISA_VARIABLE}=none", None)
    paths = sorted(Path(__file__).resolve().parent.parent.glob("_native*.so"))
    if not paths:
        return NativeLibrary("", "not built: no C compiler when branchline was installed", None)
    functions = ctypes.CDLL(str(paths[-1]))
    if functions.bl_abi_version() != ABI_VERSION:
        return NativeLibrary("", f"{paths[-1].name} is of another version; reinstall", None)
    for name, (argtypes, restype) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = argtypes, restype
    return NativeLibrary(_choose_isa(functions, wanted), "", functions)


def _choose_isa(functions: ctypes.CDLL, wanted: str) -> str:
    best = functions.bl_best_isa()
    if wanted and (wanted not in ISAS or ISAS.index(wanted) > best):
        raise ConfigError(
            f"{ISA_VARIABLE}={wanted}",
            f"this processor has {', '.join(ISAS[: best + 1])}",
            "unset the variable or name one of those, or none",
        )
    index = ISAS.index(wanted) if wanted else best
    functions.bl_set_isa(index)
    return ISAS[index]


def threads() -> int:
    """Threads a kernel may use: torch's own setting."""
    return torch.get_num_threads()
