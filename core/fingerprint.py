"""What measured times depend on, as a value that two machines can be compared by."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform as machine
from pathlib import Path

import torch

from .platform import Platform
from .report import ReportPart

_CPU_INFO = Path("/proc/cpuinfo")


class DeviceFingerprint(ReportPart):
    """What times were measured on.

    Attributes:
        device: name of the CPU or the GPU.
        capability: compute capability of a GPU ("9.0"); empty for others.
        isa: instruction set of the C kernels; empty where there are none.
        threads: of torch on a CPU; 0 on a GPU.
        torch: version.
        triton: version; empty where it is not installed.
        branchline: version.
    """

    device: str
    capability: str
    isa: str
    threads: int
    torch: str
    triton: str
    branchline: str

    def differences(self, here: DeviceFingerprint) -> tuple[str, ...]:
        """What is not the same `here`, each fact with both values; pure."""
        ours, theirs = self.model_dump(), here.model_dump()
        return tuple(
            f"{fact} was {_told(ours[fact])} and is {_told(theirs[fact])}"
            for fact in ours
            if ours[fact] != theirs[fact]
        )

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits, for logs and reports."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


def fingerprint_of(platform: Platform) -> DeviceFingerprint:
    """Of this process on the device with these facts."""
    on_cpu = platform.device_type == "cpu"
    capability = platform.capability
    return DeviceFingerprint(
        device=_cpu_name() if on_cpu else _gpu_name(platform),
        capability=f"{capability[0]}.{capability[1]}" if capability else "",
        isa=platform.native_isa or "" if on_cpu else "",
        threads=torch.get_num_threads() if on_cpu else 0,
        torch=platform.torch_version,
        triton=platform.triton_version or "",
        branchline=importlib.metadata.version("branchline"),
    )


def _told(value: object) -> str:
    return str(value) if value != "" else "none"


def _gpu_name(platform: Platform) -> str:
    # A device that is imagined has facts, but nobody here to ask for its name.
    if platform.device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return str(platform)


def _cpu_name() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return machine.processor() or machine.machine()
