"""The typer app: its commands, and how it answers an error."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..core.errors import BranchlineError
from .audit import audit
from .generate import generate
from .inspect import inspect
from .output import note
from .quantize import quantize
from .serve import ServeCommand, serve
from .verify import verify


class _Commands(TyperGroup):
    """Every command's `BranchlineError` becomes one line on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BranchlineError as error:
            note("error: " + " ".join(str(error).split()))
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    # What is no BranchlineError is a bug: it deserves Python's own traceback.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(audit)
app.command()(generate)
app.command()(inspect)
app.command()(quantize)
app.command(cls=ServeCommand)(serve)
app.command()(verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"branchline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve one FP8 base model with many PEFT adapters, fused wherever the batch allows it."""
