"""What `branchline audit` leaves: text, JSON, Markdown, HTML, rules and differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..core.errors import ConfigError
from .output import console, note, print_json

if TYPE_CHECKING:
    from ..policies.audit.diff import AuditDiff
    from ..policies.audit.report import AuditReport
    from ..policies.audit.rules import Fired, Rule

#: A rule fired.
FIRED = 1
#: Part of the audit could not be answered.
INCOMPLETE = 2


def told(report: AuditReport, rules: Sequence[Rule]) -> tuple[Fired, ...]:
    """The rules that fire.

    Raises:
        ConfigError: a rule asks for what was not audited.
    """
    from ..policies.audit.rules import check_rules

    return check_rules(rules, report)


def write(
    report: AuditReport,
    fired: tuple[Fired, ...],
    *,
    json: bool,
    markdown: bool,
    html: Path | None,
) -> None:
    """Print the report, or write it where it was asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    if html is not None:
        from ..policies.audit.page import page

        _write_file(html, page(report, fired))
    if json:
        print_json(report.model_dump_json(indent=2))
    elif markdown:
        from ..policies.audit.markdown import markdown as as_markdown

        typer.echo(as_markdown(report, fired), nl=False)
    elif html is None:
        report.render(console())
    for one in fired:
        note(f"rule {one.rule} fired: {one.found}")


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"file {str(path)!r}",
            f"cannot be written ({error.strerror})",
            "name a file in a folder that can be written to (command line: --html)",
        ) from error
    note(f"wrote {path}")


def write_diff(found: AuditDiff, *, json: bool) -> None:
    """Print what changed."""
    if json:
        print_json(found.model_dump_json(indent=2))
    else:
        found.render(console())


def code_of(report: AuditReport, fired: tuple[Fired, ...]) -> int:
    """The exit code: 2 where a part could not be audited, 1 where a rule fired or facts differ."""
    if report.problems:
        return INCOMPLETE
    return FIRED if fired or any(site.mismatches for site in report.sites) else 0
