"""`branchline calibrate`: what routes cost on this device, for policy `auto` and the audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .output import console, note, print_json, results_only_on_stdout
from .session import JsonOption

if TYPE_CHECKING:
    from ..policies.cost import DeviceCosts

DeviceOption = Annotated[
    str, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N: what to measure.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the calibration here, for --policy auto:calibration=FILE; unset: into the "
        "cache folder, where policy auto and the audit find it.",
    ),
]


def calibrate(
    device: DeviceOption = "cpu", out: OutOption = None, json: JsonOption = False
) -> None:
    """Measure what the routes cost on this device, and store it with the device's fingerprint.

    Takes about ten seconds on a CPU that does nothing else, as it should; far longer on a busy one.
    """
    from ..fusion.verify.machine import on_device, parse_device
    from ..policies.cost import calibration_file
    from ..policies.cost.measure import calibrate as measure

    place = parse_device(device)
    note(f"measuring the routes on {place}")
    # Drawn between two measurements, never beside one.
    bar = Progress(console=Console(stderr=True), transient=True, auto_refresh=False)
    with results_only_on_stdout(), on_device(place), bar:
        task = bar.add_task("measuring", total=None)
        found = measure(
            str(place),
            told=lambda done, count: bar.update(task, completed=done, total=count, refresh=True),
        )
    file = calibration_file(found.device_type) if out is None else out
    found.save(file)
    note(f"written to {file}")
    if json:
        print_json(found.model_dump_json(indent=2))
    else:
        _render(found, console())


def _render(found: DeviceCosts, console: Console) -> None:
    here = found.fingerprint
    facts = (here.isa, f"{here.threads} threads" if here.threads else "", f"torch {here.torch}")
    console.print(f"{here.device} ({', '.join(filter(None, facts))}), {here.digest}")
    table = Table(box=None)
    for heading in ("site", "key", "route"):
        table.add_column(heading)
    for heading in ("us a batch", "ns an element", "and of adapters", "a rank"):
        table.add_column(heading, justify="right")
    for cost in found.routes:
        table.add_row(
            cost.kind, cost.key, cost.route,
            f"{1e6 * (cost.call + cost.adapter_call):.1f}",
            *(f"{1e9 * n:.4f}" for n in (cost.element, cost.adapter_element, cost.product)),
        )  # fmt: skip
    console.print(table)
    console.print(
        f"fused producers move {found.bandwidth / 1e9:.1f} GB/s; the costs are off by "
        f"{100 * found.median_error:.0f} % of what was measured, the median; "
        f"{found.seconds:.0f} seconds"
    )
