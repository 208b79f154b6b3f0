"""Platform facts as data, so that every selection can be tested on any machine."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

import torch

from . import native
from .errors import ConfigError


@dataclass(frozen=True)
class Platform:
    """What selection may know about the machine.

    Attributes:
        device_type: "cpu", "cuda", ...
        capability: compute capability of an NVIDIA device, (major, minor); else None.
        torch_version: as installed.
        triton_version: as installed, or None.
        native_isa: instruction set of the C kernels in use ("amx", "avx512", "avx2", "scalar"), or
            None where the library was not built.
        native_reason: why `native_isa` is None; empty otherwise.
        interpreted: Triton runs in its interpreter (TRITON_INTERPRET=1), on CPU tensors.
        hip: a "cuda" device is one of AMD's, under ROCm.
        cuda_version: of the CUDA toolkit that torch was built with, (major, minor), or None.
    """

    device_type: str
    capability: tuple[int, int] | None
    torch_version: str
    triton_version: str | None
    native_isa: str | None
    native_reason: str = ""
    interpreted: bool = False
    hip: bool = False
    cuda_version: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.device_type == "cpu":
            return f"cpu ({self.native_isa or 'no C kernels'})"
        if self.capability:
            return f"{self.device_type} sm_{self.capability[0]}{self.capability[1]}"
        return f"{self.device_type} (rocm)" if self.hip else self.device_type


def detect_platform(device: torch.device | str = "cpu") -> Platform:
    """The facts about `device` on this machine."""
    device = torch.device(device)
    hip = torch.version.hip is not None
    # Under ROCm torch answers with an architecture that only looks like a compute capability.
    asked = device.type == "cuda" and not hip
    capability = torch.cuda.get_device_capability(device) if asked else None
    library = native.load()
    return Platform(
        device_type=device.type,
        capability=capability,
        torch_version=torch.__version__,
        triton_version=_version("triton"),
        native_isa=library.isa if library.available else None,
        native_reason=library.reason,
        interpreted=_triton_interpreted(),
        hip=hip,
        cuda_version=release(torch.version.cuda) if torch.version.cuda else None,
    )


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as "2.13.0+cpu" or "3.6.0rc1".

    Raises:
        ConfigError: it begins with no such numbers.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"version {version!r}", "has no major and minor number", "name a release")
    return int(found[1]), int(found[2])


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
