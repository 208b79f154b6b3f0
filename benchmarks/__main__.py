"""All benchmarks: ``python -m benchmarks [--short]``."""

from __future__ import annotations

import argparse

from benchmarks.adapters import loading, lora
from benchmarks.linear import decode, head, matmul
from benchmarks.moe import experts
from benchmarks.policies import auto
from benchmarks.producers import activation, norm, routes
from benchmarks.serving import throughput
from branchline.core import native


def main() -> None:
    """Run every benchmark that this installation can run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="few repetitions, and no whole models, as CI runs it"
    )
    short: bool = parser.parse_args().short
    library = native.load()
    if not library.available:
        print(f"nothing to compare: the C kernels are absent ({library.reason})")
        return
    print(f"C kernels on {library.isa}")
    # Those that need whole models take minutes, however few their repetitions.
    models = () if short else (decode, lora, loading, throughput)
    for module in (activation, norm, routes, matmul, head, experts, auto, *models):
        module.run(short)


if __name__ == "__main__":
    main()
