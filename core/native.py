"""The C kernels: a plain shared library built by the install, loaded with ctypes.

Without it (no compiler at install time) everything still works through eager code, and the audit
shows the slower choice with `NativeLibrary.reason`.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import ConfigError

ABI_VERSION = 1
ISA_VARIABLE = "BRANCHLINE_NATIVE_ISA"
_ISAS = ("scalar", "avx2", "avx512")

_PTR, _I64, _INT, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, list[type]] = {
    "bl_act_static": [_INT, _PTR, _I64, _PTR, _I64, _PTR, _I64, _I64, _I64, _F32, _INT],
    "bl_rms_norm_static": [
        _INT, _PTR, _I64, _PTR, _PTR, _I64, _PTR, _I64, _I64, _I64, _F32, _F32, _INT,
    ],
    "bl_quantize_token": [_PTR, _I64, _PTR, _I64, _PTR, _I64, _I64, _INT],
    "bl_fp8_decode": [_PTR, _I64, _PTR, _I64, _I64, _I64, _INT],
}  # fmt: skip


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
        """Call one kernel; the argument order is that of native/branchline_native.h."""
        assert self.functions is not None, self.reason
        getattr(self.functions, name)(*arguments)


@functools.cache
def load() -> NativeLibrary:
    """The C kernels of this installation, on the widest instruction set the processor has.

    The environment variable BRANCHLINE_NATIVE_ISA (scalar, avx2, avx512, none) chooses another.

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
    for name, argtypes in _SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = argtypes, None
    return NativeLibrary(_choose_isa(functions, wanted), "", functions)


def _choose_isa(functions: ctypes.CDLL, wanted: str) -> str:
    best = functions.bl_best_isa()
    if wanted and (wanted not in _ISAS or _ISAS.index(wanted) > best):
        raise ConfigError(
            f"{ISA_VARIABLE}={wanted}",
            f"this processor has {', '.join(_ISAS[: best + 1])}",
            "unset the variable or name one of those, or none",
        )
    index = _ISAS.index(wanted) if wanted else best
    functions.bl_set_isa(index)
    return _ISAS[index]


def threads() -> int:
    """Threads a kernel may use: torch's own setting."""
    return torch.get_num_threads()
