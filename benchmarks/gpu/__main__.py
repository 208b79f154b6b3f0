"""Everything on a GPU: checked against the definition, then timed.

``python -m benchmarks.gpu --out results.json`` runs every part in this process; ``run.sh`` runs
each in a process and a time of its own.  A part that is ended early (SIGTERM) still writes the
lines that it has.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import experts, graphs, matmul, producers, routes
from benchmarks.harness import say
from benchmarks.results import machine
from branchline.fusion import verify

PARTS = ("producers", "matmul", "experts", "routes", "graphs")


def _arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--device", {"default": "cuda", "help": "cuda; cpu, for trying this out"}
    yield "--rows", {"type": int, "nargs": "+", "default": [4096, 64, 1]}
    yield "--columns", {"type": int, "default": 11264}
    yield "--tokens", {"type": int, "nargs": "+", "default": matmul.TOKENS}
    yield "--weights", {"nargs": "+", "default": matmul.WEIGHTS, "metavar": "NxK"}
    yield "--layers", {"nargs": "+", "default": experts.LAYERS, "metavar": "ExkxNxK"}
    yield "--hidden", {"type": int, "default": 2048, "help": "columns of the served model"}
    yield "--depth", {"type": int, "default": 4, "help": "layers of the served model"}
    yield "--adapters", {"type": int, "nargs": "+", "default": routes.COUNTS}
    yield "--prompts", {"type": int, "nargs": "+", "default": routes.PROMPTS}
    yield "--only", {"choices": PARTS, "action": "append", "help": "leave the rest out"}
    yield "--compile", {"action": "store_true", "help": "producers beside torch.compile too"}
    yield "--rounds", {"type": int, "default": 50}
    yield "--out", {"type": Path, "help": "write the results as JSON"}
    yield "--no-verify", {"action": "store_true", "help": "skip the check against the definition"}


def main(arguments: list[str] | None = None) -> int:
    """Verify, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    for name, settings in _arguments():
        parser.add_argument(name, **settings)
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    results: dict[str, Any] = {
        "device": _device_name(chosen.device),
        "torch": torch.__version__,
        "machine": machine().model_dump(mode="json"),
        "finished": False,
    }
    begun = time.perf_counter()
    try:
        code = _measure(chosen, results)
        results["finished"] = code == 0
        return code
    finally:
        results["seconds"] = time.perf_counter() - begun
        if chosen.out is not None:
            text = json.dumps(results, indent=1) + "\n"
            chosen.out.write_text(text, encoding="utf-8")


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _measure(chosen: argparse.Namespace, results: dict[str, Any]) -> int:
    parts = chosen.only or PARTS
    if "producers" in parts and not chosen.no_verify:
        report = verify(device=chosen.device, quick=True)
        say(str(report))
        results["verify"] = report.model_dump(mode="json")
        if not report.ok:
            # No speed of a kernel that computes something else.
            return 1
    for part in parts:
        lines: list[dict[str, Any]] = []
        results["lines" if part == "producers" else part] = lines
        for line in _lines(part, chosen):
            lines.append(line)
    return 0


def _lines(part: str, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device, rounds, tokens = chosen.device, chosen.rounds, tuple(chosen.tokens)
    if part == "producers":
        rows = tuple(chosen.rows)
        return producers.run(device, rows, chosen.columns, rounds, chosen.compile)
    if part == "matmul":
        return matmul.run(device, tokens, tuple(chosen.weights), rounds)
    if part == "experts":
        return experts.run(device, tokens, tuple(chosen.layers), rounds)
    if part == "routes":
        sizes = routes.Sizes(
            chosen.hidden, chosen.depth, tuple(chosen.adapters), tuple(chosen.prompts)
        )
        return routes.run(device, sizes, rounds)
    return graphs.run(device, chosen.hidden, chosen.depth, rounds)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


if __name__ == "__main__":
    raise SystemExit(main())
