"""Times on a GPU, where Python and the device run side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch


def alternate(functions: Iterable[Callable[[], object]], device: str, rounds: int) -> list[float]:
    """Median seconds of each, run in turn after a warm-up."""
    chosen = tuple(functions)
    times: list[list[float]] = [[] for _ in chosen]
    for measured in range(-3, rounds):
        for function, record in zip(chosen, times, strict=True):
            seconds = _seconds(function, device)
            if measured >= 0:
                record.append(seconds)
    return [statistics.median(record) for record in times]


def wall(functions: Iterable[Callable[[], object]], device: str, rounds: int) -> list[float]:
    """Median seconds of each until the device is done, what Python takes to launch included."""
    chosen = tuple(functions)
    times: list[list[float]] = [[] for _ in chosen]
    for measured in range(-3, rounds):
        for function, record in zip(chosen, times, strict=True):
            wait(device)
            start = time.perf_counter()
            function()
            wait(device)
            if measured >= 0:
                record.append(time.perf_counter() - start)
    return [statistics.median(record) for record in times]


def wait(device: str) -> None:
    """Until the device has done all that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def copy_bandwidth(device: str, rounds: int) -> float:
    """Bytes a second of a copy that no cache holds, read and written."""
    size = 2**30 if device.startswith("cuda") else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (seconds,) = alternate((lambda: target.copy_(source),), device, min(rounds, 20))
    return 2 * size / seconds


def _seconds(function: Callable[[], object], device: str) -> float:
    if not device.startswith("cuda"):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # A queue of work ahead hides the time that Python takes to launch.
    torch.cuda._sleep(200_000)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
