"""How much memory a device has left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated there: of the host, within the limit of its container.

    Args:
        device: a CPU or CUDA device.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(_host_free(), *_container_free())


def _host_free() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_free() -> list[int]:
    found = [2**63]
    for limit, used in _LIMITS:
        try:
            most, now = Path(limit).read_text().strip(), Path(used).read_text().strip()
        except OSError:
            continue
        if most.isdigit() and now.isdigit():
            found.append(max(0, int(most) - int(now)))
    return found
