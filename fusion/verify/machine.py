"""The device that is asked for, and the facts about it that a report states."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform as python_platform

import torch

from ...core.errors import ConfigError
from .report import Versions

_DEVICES = ("cpu", "cuda")


def parse_device(text: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: unknown, of a type without producers, or not there.
    """
    subject, remedy = f"device {text!r}", "pass cpu, cuda or cuda:N of a device that is there"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(subject, "is no name of a device", remedy) from None
    if device.type not in _DEVICES:
        raise ConfigError(subject, f"has no producers; {', '.join(_DEVICES)} have", remedy)
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(subject, "is not there: torch sees no CUDA device", remedy)
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(subject, f"is not there: this machine has {count}", remedy)
    return device


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched there: a launch goes to the current device, whatever its tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def device_name(device: torch.device) -> str:
    """What the hardware calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return python_platform.processor() or python_platform.machine()


def versions() -> Versions:
    """Of this package and of what is no part of a `Platform`."""
    return Versions(
        branchline=importlib.metadata.version("branchline"),
        python=python_platform.python_version(),
        cuda=torch.version.cuda,
    )
