"""The typer app: its commands, and how it answers an error."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..core.errors import BranchlineError
from .output import note

#: Each of them a module beside this one, with a function of that name.
COMMANDS = ("audit", "calibrate", "generate", "inspect", "quantize", "serve", "simulate", "verify")


class _Commands(TyperGroup):
    """Commands are imported when they are asked for, since torch and transformers take seconds.

    Every command's `BranchlineError` becomes one line on stderr and exit code 1.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """See click."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """See click."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module = import_module(f".{cmd_name}", __package__)
            alone = typer.Typer(**_SETTINGS)
            alone.command(cls=getattr(module, "COMMAND_CLASS", None))(getattr(module, cmd_name))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return self.commands[cmd_name]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BranchlineError as error:
            note("error: " + " ".join(str(error).split()))
            raise typer.Exit(1) from error


_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    # What is no BranchlineError is a bug: it deserves Python's own traceback.
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(cls=_Commands, no_args_is_help=True, **_SETTINGS)


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
