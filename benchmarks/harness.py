"""Measuring two callables against each other in one run, so that a busy machine slows both."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.results import Result
from branchline.core import QuantKey, quantize
from branchline.linear.contract import InputContract, InputScale

THREADS = 2
SCALE = 0.0371
GLOBAL_SCALE = 2.7e-3


class ResultsDifferError(AssertionError):
    """A speed-up over something that computes another result is none."""


@dataclass(frozen=True)
class Comparison:
    """Seconds of two callables, measured alternately."""

    ours: list[float]
    theirs: list[float]

    def ratio(self, pick: Callable[[list[float]], float] = statistics.median) -> float:
        """How many times as long theirs takes; by the median, or by `min`, the undisturbed run."""
        return pick(self.theirs) / pick(self.ours)


def alternate(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> Comparison:
    """Run both in turn, `rounds` times each after a warm-up."""
    return Comparison(*alternate_all((ours, theirs), rounds))


def alternate_all(functions: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each function, run in turn `rounds` times after a warm-up."""
    found: list[list[float]] = [[] for _ in functions]
    for measured in range(-2, rounds):
        for function, record in zip(functions, found, strict=True):
            start = time.perf_counter()
            function()
            elapsed = time.perf_counter() - start
            if measured >= 0:
                record.append(elapsed)
    return found


def _bits(result: torch.Tensor) -> torch.Tensor:
    return result.view(torch.uint8)


def report_speedup(
    benchmark: str,
    label: str,
    ours: Callable[[], torch.Tensor],
    theirs: Callable[[], torch.Tensor],
    rounds: int,
    aim: float | None = None,
) -> Result:
    """Print and return how many times faster `ours` is.

    Raises:
        ResultsDifferError: the two results are not the same bytes.
    """
    differing = int((_bits(ours()) != _bits(theirs())).sum())
    if differing:
        raise ResultsDifferError(f"{label}: {differing} bytes differ")
    found = alternate(ours, theirs, rounds)
    _print(label, found, f"{found.ratio():.1f} times faster (best runs: {found.ratio(min):.1f})")
    return _result(benchmark, label, found, aim)


def report_time_of(
    benchmark: str,
    label: str,
    ours: Callable[[], object],
    yardstick: Callable[[], object],
    rounds: int,
) -> Result:
    """Print and return the time of `ours` beside a yardstick that computes something else."""
    found = alternate(ours, yardstick, rounds)
    verdict = f"{1 / found.ratio():.2f} times its time (best runs: {1 / found.ratio(min):.2f})"
    _print(label, found, verdict)
    return _result(benchmark, label, found)


def _result(benchmark: str, label: str, found: Comparison, aim: float | None = None) -> Result:
    case, _, against = label.rpartition(" against ")
    ours, theirs = map(statistics.median, (found.ours, found.theirs))
    return timed(benchmark, case, ours, (against, theirs), aim)


def timed(
    benchmark: str,
    case: str,
    seconds: float,
    against: tuple[str, float],
    aim: float | None = None,
) -> Result:
    """A result of seconds beside those of what it is compared with."""
    what, theirs = against
    return Result(
        benchmark=benchmark,
        case=case,
        value=seconds * 1e6,
        unit="us",
        ratio=theirs / seconds,
        against=what,
        aim=aim,
    )


def rated(
    benchmark: str,
    case: str,
    rate: float,
    against: tuple[str, float],
    aim: float | None = None,
) -> Result:
    """A result of tokens a second beside those of what it is compared with."""
    what, theirs = against
    return Result(
        benchmark=benchmark,
        case=case,
        value=rate,
        unit="tok/s",
        ratio=rate / theirs,
        against=what,
        aim=aim,
    )


def _print(label: str, found: Comparison, verdict: str) -> None:
    medians = map(statistics.median, (found.ours, found.theirs))
    ours, theirs = (f"{seconds * 1e6:9.1f} us" for seconds in medians)
    print(f"{label:<58}{ours} against{theirs}   {verdict}", flush=True)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def contract_for(key: QuantKey) -> InputContract:
    """A consumer of `key`."""
    return InputContract(
        key,
        InputScale.checked(SCALE, "benchmark") if key.static else None,
        InputScale.checked(GLOBAL_SCALE, "benchmark") if key.global_scale else None,
    )


def eager_codes(raw: torch.Tensor, key: QuantKey) -> torch.Tensor:
    """Codes of a raw activation by torch's own ops."""
    scale, given = torch.tensor([SCALE]), torch.tensor([GLOBAL_SCALE])
    return quantize(
        raw,
        key,
        static_scale=scale if key.static else None,
        global_scale=given if key.global_scale else None,
    ).codes


def _keep_freed_memory() -> None:
    """Let the allocator keep what is freed, as it does in a process that has run for a while.

    Otherwise it decides from one size to the next whether to give memory back, and the page faults
    of getting it again cost several times what any kernel here does, on both sides.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def begin(title: str) -> None:
    """Set the number of threads, and say what and how is measured."""
    torch.set_num_threads(THREADS)
    _keep_freed_memory()
    print(f"\n{title}: medians, {THREADS} threads, alternating")


def random_bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    """Activations of ordinary size."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2).bfloat16()


def rounds_for(rows: int, short: bool) -> int:
    """Repetitions: many for one row, which takes microseconds."""
    if short:
        return 5
    return 1000 if rows == 1 else 41
