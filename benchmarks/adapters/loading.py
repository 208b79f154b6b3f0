"""How adapters come and go, against PEFT, with few and with many of them there.

``python -m benchmarks.adapters.loading [--short]``: on the model of `lora`, elapsed time, medians,
alternating; loading ends when the adapter lies in a slot.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter

import branchline
from benchmarks.adapters.lora import RANK, measure, model, quiet, save_adapters
from benchmarks.harness import say, timed
from benchmarks.results import Result

MOST = 33
#: Never slower than PEFT, however many adapters are there.
AIM = 1.0
#: One that comes and goes, and two that take turns under one name.
_NAMES = [f"adapter{index}" for index in range(MOST)]
_COMES, _TURNS = "comes", ("before", "after")


class Contest:
    """Both sides with the same adapters; the first is swapped.

    Args:
        folder: where the adapters are.
        loaded: how many are there.
    """

    def __init__(self, folder: Path, loaded: int) -> None:
        self._folder = folder
        self._swaps = 0
        self.ours = branchline.wrap(
            model(),
            quant="none",
            lora_dtype="float32",
            max_loras=MOST + 1,
            max_lora_rank=RANK,
        )
        first, *others = _NAMES[:loaded]
        self.theirs = PeftModel.from_pretrained(model(), folder / first, first)
        self.ours.adapters.load(first, folder / first)
        for name in others:
            self.theirs.load_adapter(folder / name, name)
            self.ours.adapters.load(name, folder / name)

    def load(self) -> None:
        """One more, ours."""
        self.ours.adapters.load(_COMES, self._folder / _COMES)

    def unload(self) -> None:
        """It goes."""
        self.ours.adapters.unload(_COMES)

    def load_theirs(self) -> None:
        """One more, PEFT's."""
        self.theirs.load_adapter(self._folder / _COMES, _COMES)

    def unload_theirs(self) -> None:
        """It goes."""
        self.theirs.delete_adapter(_COMES)

    def swap(self) -> None:
        """Other weights under the first name, ours."""
        self.ours.adapters.swap(_NAMES[0], self._next())

    def swap_theirs(self) -> None:
        """The same, PEFT's."""
        hotswap_adapter(self.theirs, self._next(), _NAMES[0])

    def _next(self) -> Path:
        self._swaps += 1
        # Each side takes both in turn.
        return self._folder / _TURNS[self._swaps // 2 % 2]


def _report(title: str, functions: list[Callable[[], object]], rounds: int, *shown: int) -> Result:
    spent = measure(functions, rounds, time.perf_counter)
    ours, theirs = (statistics.median(spent[index]) * 1e3 for index in shown)
    say(f"{title:<24} ours {ours:7.1f} ms; PEFT {theirs:7.1f} ms, {theirs / ours:5.1f} times ours")
    return timed("loading", title, ours / 1e3, ("PEFT", theirs / 1e3), AIM)


def run(short: bool) -> list[Result]:
    """Measure everything."""
    results: list[Result] = []
    say("\nAdapters that come and go: elapsed time, medians, alternating, one thread")
    torch.set_num_threads(1)
    counts, rounds = ((1,), 1) if short else ((1, 16, MOST), 15)
    with tempfile.TemporaryDirectory() as folder, quiet():
        names = [*_NAMES[: max(counts)], _COMES, *_TURNS]
        save_adapters(Path(folder), names)
        for loaded in counts:
            contest = Contest(Path(folder), loaded)
            steps = [contest.load, contest.unload, contest.load_theirs, contest.unload_theirs]
            results.append(_report(f"load, {loaded} there", steps, rounds, 0, 2))
            swaps: list[Callable[[], object]] = [contest.swap, contest.swap_theirs]
            results.append(_report(f"swap, {loaded} there", swaps, rounds, 0, 1))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters.loading")
    parser.add_argument("--short", action="store_true", help="few repetitions")
    run(parser.parse_args().short)
