"""What goes where: results to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import typer
from rich.console import Console

_PIPE_WIDTH = 140


def note(text: str) -> None:
    """One line on stderr."""
    typer.echo(text, err=True)


def print_json(text: str) -> None:
    """The one thing on stdout."""
    typer.echo(text)


def console() -> Console:
    """Stdout for a person.  Tables in a pipe or a file are not squeezed into 80 columns."""
    made = Console()
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PIPE_WIDTH
    return made


@contextmanager
def results_only_on_stdout() -> Iterator[None]:
    """Whatever a library prints inside goes to stderr."""
    with redirect_stdout(sys.stderr):
        yield


def quiet_libraries() -> None:
    """No progress bars, log lines and warnings of libraries, which nobody here can act on.

    To be called before any of them is imported.
    """
    # By their variables: importing them takes longer than many a command.
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    # -W and PYTHONWARNINGS are a wish to see them.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
