"""`branchline quantize`: a float checkpoint becomes a quantised one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ..serving.folder import check_folder
from ..serving.load import load_tokenizer
from ..serving.quantize import Progress as Tell
from ..serving.quantize import quantize_checkpoint
from ..serving.quantize_plan import QuantizeConfig
from .calibration import calibration_data
from .options import with_settings
from .output import console, note, print_json, results_only_on_stdout
from .session import JsonOption, ModelArgument

OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist yet.")
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For --scheme fp8-static and nvfp4: a .txt of prompts, one a line, or a .json of "
        "saved ranges; without it a small built-in set of English prompts.",
    ),
]


@with_settings(QuantizeConfig, panel="Quantising")
def quantize(
    model: ModelArgument,
    out: OutArgument,
    *,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
    settings: QuantizeConfig,
) -> None:
    """Write MODEL, quantised, to OUT: a checkpoint that this library and transformers read.

    One file of the model is in memory at a time. A run that was stopped is continued by the same
    command.
    """
    if calibration and not settings.linear_scheme.calibrated:
        raise typer.BadParameter(
            f"--scheme {settings.scheme} has no scales to calibrate; drop the file",
            param_hint="--calibration",
        )
    note(f"quantising {model} as {settings.scheme}")
    check_folder(model)
    with results_only_on_stdout():
        data = None
        if settings.linear_scheme.calibrated:
            data = calibration_data(calibration, lambda: load_tokenizer(model))
        # Unset settings stay unset: one that is set and would have no effect is refused.
        typed = settings.model_dump(exclude_unset=True)
        with _bar() as tell:
            report = quantize_checkpoint(model, out, calibration=data, progress=tell, **typed)
    if json:
        print_json(report.model_dump_json(indent=2))
    else:
        report.render(console())


@contextmanager
def _bar() -> Iterator[Tell]:
    """A progress bar on stderr, and how to move it."""
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the headers", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield tell
