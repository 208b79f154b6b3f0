"""`branchline verify`: do the kernels of this machine equal the oracle, bit for bit?"""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.errors import KernelUnavailableError
from ..fusion.verify import verify_all as run
from .output import console, note, print_json, results_only_on_stdout
from .session import JsonOption

DeviceOption = Annotated[
    str, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N: whose kernels to verify.")
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="A few shapes and settings: seconds, not a minute.")
]


def verify(
    device: DeviceOption = "cpu", json: JsonOption = False, quick: QuickOption = False
) -> None:
    """Compare every kernel that runs on this machine with the eager definition.

    Producers bit for bit; matmuls of base weights as near as float32 sums come to float64, and
    each row's bytes alone with those among other rows.

    Exit code 1 where one byte differs, or where no kernel runs at all.
    """
    note(f"verifying the kernels on {device}")
    with results_only_on_stdout():
        report = run(device, quick)
    if json:
        print_json(report.model_dump_json(indent=2))
    else:
        report.render(console())
    if not report.verified:
        raise KernelUnavailableError(
            f"verify on {device}",
            f"no kernel runs here, so nothing was compared ({'; '.join(report.absent())})",
            "install branchline where a C compiler is, or verify a GPU where Triton is installed",
        )
    if not report.ok:
        note(f"error: {report.count('fail')} entries differ from the oracle")
        raise typer.Exit(1)
