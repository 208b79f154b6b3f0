"""Platform facts as data, so that every selection can be tested on any machine."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

import torch

from . import native


@dataclass(frozen=True)
class Platform:
    """What selection may know about the machine.

    Attributes:
        device_type: "cpu", "cuda", ...
        capability: compute capability of a CUDA device, (major, minor); else None.
        torch_version: as installed.
        triton_version: as installed, or None.
        native_isa: instruction set of the C kernels in use ("avx512", "avx2", "scalar"), or None
            where the library was not built.
        native_reason: why `native_isa` is None; empty otherwise.
        interpreted: Triton runs in its interpreter (TRITON_INTERPRET=1), on CPU tensors.
    """

    device_type: str
    capability: tuple[int, int] | None
    torch_version: str
    triton_version: str | None
    native_isa: str | None
    native_reason: str = ""
    interpreted: bool = False

    def __str__(self) -> str:
        if self.device_type == "cpu":
            return f"cpu ({self.native_isa or 'no C kernels'})"
        if self.capability:
            return f"{self.device_type} sm_{self.capability[0]}{self.capability[1]}"
        return self.device_type


def detect_platform(device: torch.device | str = "cpu") -> Platform:
    """The facts about `device` on this machine."""
    device = torch.device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    library = native.load()
    return Platform(
        device_type=device.type,
        capability=capability,
        torch_version=torch.__version__,
        triton_version=_version("triton"),
        native_isa=library.isa if library.available else None,
        native_reason=library.reason,
        interpreted=_triton_interpreted(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _triton_interpreted() -> bool:
    if _version("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
