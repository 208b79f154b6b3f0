"""What benchmarks found, as data: results, the machine they ran on, and one JSON file of both."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from branchline.core import native

PACKAGES = ("torch", "transformers", "peft", "triton")


class Frozen(BaseModel):
    """Data that nobody changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Result(Frozen):
    """One figure.

    Attributes:
        benchmark: its name on the command line.
        case: what was measured.
        value: the figure, in `unit`.
        unit: "us", "tok/s" or "% longer".
        ratio: how many times as fast as `against` it was: below 1 it was slower.
        against: what it is compared with.
        aim: what `ratio` should be at least; None where nothing is promised.
    """

    benchmark: str
    case: str
    value: float
    unit: str
    ratio: float
    against: str
    aim: float | None = None


class Machine(Frozen):
    """Where the figures come from; memory in bytes."""

    cpu: str
    isa: str
    cores: int
    memory: int
    python: str
    versions: dict[str, str]


class Run(Frozen):
    """All results of one call, with the load average (one minute) at both ends."""

    date: str
    short: bool
    threads: int
    machine: Machine
    load_before: float
    load_after: float
    results: tuple[Result, ...]


def machine() -> Machine:
    """The facts of this machine."""
    return Machine(
        cpu=_cpu_model(),
        isa=native.load().isa or "none",
        cores=os.cpu_count() or 1,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        versions={name: version(name) for name in PACKAGES},
    )


def _cpu_model() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def finish(results: list[Result], short: bool, load_before: float, threads: int) -> Run:
    """A run that ends now.

    Args:
        results: of it.
        short: few repetitions.
        load_before: when it began.
        threads: of all benchmarks that do not say otherwise.
    """
    return Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        short=short,
        threads=threads,
        machine=machine(),
        load_before=load_before,
        load_after=os.getloadavg()[0],
        results=tuple(results),
    )
