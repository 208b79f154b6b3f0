"""The command line: `branchline`, or `python -m branchline`."""

from .app import app
from .output import quiet_libraries

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    quiet_libraries()
    app(prog_name="branchline")
