"""Devices by name, as data: what selection and the cost model know of one that is not here.

Numbers are those of the vendors' datasheets: memory bandwidth, and dense (not sparse) tensor-core
rates.  A launch is what a kernel of a few microseconds costs beyond its work.  The CPU's are those
of one socket of a recent server; `branchline calibrate` measures this machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from .errors import ConfigError
from .platform import Platform, detect_platform


@dataclass(frozen=True)
class DeviceSpec:
    """A device that costs are estimated for.

    Attributes:
        kind: its name ("h200", "cpu").
        platform: what kernels and producers are chosen by.
        bandwidth: of its memory, bytes a second.
        fp8_flops: of FP8 matmuls, operations a second.
        bf16_flops: of bfloat16 matmuls.
        launch_seconds: what one launch costs.
        measured: whether the numbers were measured on the device itself.
        fingerprint: of what they were measured on; empty for a datasheet's.
    """

    kind: str
    platform: Platform
    bandwidth: float
    fp8_flops: float
    bf16_flops: float
    launch_seconds: float
    measured: bool = False
    fingerprint: str = ""


@dataclass(frozen=True)
class _Sheet:
    capability: tuple[int, int] | None
    bandwidth: float
    fp8_flops: float
    bf16_flops: float
    launch_seconds: float = 3e-6


_SHEETS: Mapping[str, _Sheet] = MappingProxyType(
    {
        "cpu": _Sheet(None, 100e9, 1e12, 1e12, 2e-6),
        "l4": _Sheet((8, 9), 300e9, 242e12, 121e12),
        "l40s": _Sheet((8, 9), 864e9, 733e12, 362e12),
        "rtx-4090": _Sheet((8, 9), 1008e9, 330e12, 165e12),
        "h100": _Sheet((9, 0), 3.35e12, 1979e12, 989e12),
        "h200": _Sheet((9, 0), 4.8e12, 1979e12, 989e12),
        "b200": _Sheet((10, 0), 8e12, 4500e12, 2250e12),
        "rtx-5090": _Sheet((12, 0), 1792e9, 419e12, 209e12),
        "rtx-pro-6000": _Sheet((12, 0), 1792e9, 1000e12, 500e12),
    }
)
#: What `device_spec` knows.
DEVICE_KINDS = tuple(_SHEETS)


def device_spec(kind: str) -> DeviceSpec:
    """The device called `kind`, with the versions of torch and Triton of this installation.

    Raises:
        ConfigError: there is none.
    """
    sheet = _SHEETS.get(kind)
    if sheet is None:
        raise ConfigError(
            f"device {kind!r}", "is not known", f"choose one of: {', '.join(DEVICE_KINDS)}"
        )
    here = detect_platform("cpu")
    platform = here
    if sheet.capability is not None:
        platform = replace(
            here,
            device_type="cuda",
            capability=sheet.capability,
            cuda_version=here.cuda_version or (13, 0),
            interpreted=False,
            hip=False,
        )
    return DeviceSpec(
        kind,
        platform,
        sheet.bandwidth,
        sheet.fp8_flops,
        sheet.bf16_flops,
        sheet.launch_seconds,
    )


def nearest_spec(platform: Platform) -> DeviceSpec:
    """The datasheet of the device with these facts, or of the next one of its kind."""
    alike = [k for k, sheet in _SHEETS.items() if sheet.capability == platform.capability]
    if platform.device_type == "cpu" or not alike:
        kind = "cpu" if platform.device_type == "cpu" else "h100"
    else:
        kind = alike[0]
    return replace(device_spec(kind), platform=platform)
