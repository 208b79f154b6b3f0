"""All benchmarks: ``python -m benchmarks [--short] [--only NAME] [--out FILE]``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.adapters import loading, lora
from benchmarks.harness import THREADS
from benchmarks.linear import decode, head, matmul
from benchmarks.moe import experts
from benchmarks.policies import auto
from benchmarks.producers import activation, norm, routes
from benchmarks.results import Result, finish
from benchmarks.serving import throughput
from branchline.core import native

KERNELS = {
    "activation": activation,
    "norm": norm,
    "routes": routes,
    "matmul": matmul,
    "head": head,
    "experts": experts,
    "auto": auto,
}
# Those that need whole models take minutes, however few their repetitions.
MODELS = {"decode": decode, "lora": lora, "loading": loading, "throughput": throughput}


def main() -> None:
    """Run every benchmark that this installation can run, or those that are asked for."""
    given = _arguments()
    library = native.load()
    if not library.available:
        raise SystemExit(
            f"error: nothing to compare: the C kernels are absent ({library.reason}); "
            "install a C compiler and run make setup"
        )
    print(f"C kernels on {library.isa}")
    load_before = os.getloadavg()[0]
    chosen = given.only or [*KERNELS, *(() if given.short else MODELS)]
    results: list[Result] = []
    for name in chosen:
        results += (KERNELS | MODELS)[name].run(given.short)
        if given.out:
            # After each: what is measured stays, whatever comes of the next.
            given.out.parent.mkdir(parents=True, exist_ok=True)
            found = finish(results, given.short, load_before, THREADS)
            given.out.write_text(found.model_dump_json(indent=2), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="few repetitions, and no whole models, as CI runs it"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[*KERNELS, *MODELS],
        help="this benchmark (more than once for several)",
    )
    parser.add_argument("--out", type=Path, help="write results and machine to this file, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
