"""Times on a GPU, where Python and the device run side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def alternate(functions: tuple[Callable[[], object], ...], device: str, rounds: int) -> list[float]:
    """Median seconds of each, run in turn after a warm-up."""
    times: list[list[float]] = [[] for _ in functions]
    for measured in range(-3, rounds):
        for function, record in zip(functions, times, strict=True):
            seconds = _seconds(function, device)
            if measured >= 0:
                record.append(seconds)
    return [statistics.median(record) for record in times]


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
