"""What a verification found, as values, as JSON and as a table."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Literal

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ...core.platform import Platform
from ...core.report import ReportPart

SCHEMA_VERSION = 1
_COLOURS = {"pass": "green", "fail": "red", "not here": "yellow"}

Kind = Literal["pass", "fail", "not here"]


#: Characters; a compiler's message can be the whole kernel.
_LONGEST_ERROR = 300


def error_text(error: Exception) -> str:
    """What was raised, on one line of bounded length."""
    text = " ".join(f"raised {type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"


class Difference(ReportPart):
    """The first difference of a line.

    Attributes:
        case: the input, by name.
        key: the key with its layout.
        what: which output: "codes", "scale", "raw", "shrunk", "residual", or "error"; of a matmul
            "output", "row alone" or "row among others".
        index: of the element in that output.
        input: the inputs that the element comes from.
        got: what the producer made.
        wanted: what the oracle makes.
    """

    case: str
    key: str
    what: str
    index: tuple[int, ...]
    input: str
    got: str
    wanted: str

    def __str__(self) -> str:
        where = f" at {list(self.index)}" if self.index else ""
        return (
            f"{self.what}{where} of {self.key} for {self.case}: got {self.got}, "
            f"wanted {self.wanted} ({self.input})"
        )


class Line(ReportPart):
    """One implementation of one registry entry.

    Attributes:
        producer: its name in the registry; of a matmul, the kernel's.
        family: of the semantics; of a matmul, whether it is a linear's or that of experts.
        key: the plain key; of a matmul, the scheme.
        route: what is emitted beside the codes; of a matmul "base".
        verdict: "not here" where nothing was compared.
        reason: why nothing was compared; empty otherwise.
        refused: what its predicates refused among cases of which others were compared.
        cases: calls compared.
        elements: output elements compared.
        differences: how many of them differ, an exception counting as one.
        first: the first of them.
    """

    producer: str
    family: str
    key: str
    route: str
    verdict: Kind
    reason: str
    refused: tuple[str, ...]
    cases: int
    elements: int
    differences: int
    first: Difference | None


class Versions(ReportPart):
    """Of what computes: the libraries that are no part of `Platform`."""

    branchline: str
    python: str
    cuda: str | None


class VerifyReport(ReportPart):
    """What `verify` returns; `str()` is the table, `model_dump_json()` the JSON."""

    schema_version: int
    device: str
    device_name: str
    platform: Platform
    versions: Versions
    quick: bool
    seconds: float
    lines: tuple[Line, ...]

    def count(self, verdict: Kind) -> int:
        """How many lines have that verdict."""
        return sum(line.verdict == verdict for line in self.lines)

    @property
    def verified(self) -> bool:
        """Whether anything was compared at all."""
        return any(line.verdict != "not here" for line in self.lines)

    @property
    def ok(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.verified and not self.count("fail")

    def absent(self) -> tuple[str, ...]:
        """Why implementations do not run here: "producer: reason", each once."""
        return tuple(
            dict.fromkeys(
                f"{line.producer}: {line.reason}"
                for line in self.lines
                if line.verdict == "not here"
            )
        )

    def render(self, console: Console) -> None:
        """Print the report for a person."""
        console.print(_headline(self))
        if self.lines:
            console.print(_table(self.lines))
        failures = [line for line in self.lines if line.first is not None]
        if failures:
            console.print(_failures(failures))
        notes = dict.fromkeys(
            f"{line.producer}: {why}" for line in self.lines for why in line.refused
        )
        for note in notes:
            console.print(Text(f"not compared, refused by {note}", style="yellow"))

    def __str__(self) -> str:
        buffer = io.StringIO()
        self.render(Console(file=buffer, width=140, no_color=True))
        return buffer.getvalue()


def _headline(report: VerifyReport) -> Text:
    platform, versions = report.platform, report.versions
    parts = [
        f"{platform} ({report.device_name})",
        f"branchline {versions.branchline}",
        f"torch {platform.torch_version}",
        f"triton {platform.triton_version or 'absent'}",
        f"python {versions.python}",
    ]
    if versions.cuda:
        parts.append(f"cuda {versions.cuda}")
    elements = sum(line.elements for line in report.lines)
    return Text(
        f"{', '.join(parts)}\n"
        f"{report.count('pass')} entries equal the oracle, {report.count('fail')} differ, "
        f"{report.count('not here')} do not run here; {elements:,} elements compared in "
        f"{report.seconds:.1f} s{' (quick)' if report.quick else ''}"
    )


def _table(lines: Iterable[Line]) -> Table:
    table = Table(
        "producer",
        Column("family", overflow="fold"),
        Column("keys", overflow="fold"),
        "routes",
        Column("cases", justify="right"),
        Column("elements", justify="right"),
        Column("differences", justify="right"),
        "verdict",
    )
    for group in _alike(lines):
        first = group[0]
        families = dict.fromkeys(line.family for line in group)
        keys = dict.fromkeys(line.key for line in group)
        verdict = f"{first.verdict}: {first.reason}" if first.reason else first.verdict
        table.add_row(
            first.producer,
            Text(first.family if len(families) == 1 else f"{len(families)} families"),
            first.key if len(keys) == 1 else f"{len(keys)} keys",
            ", ".join(dict.fromkeys(line.route for line in group)),
            f"{sum(line.cases for line in group):,}",
            f"{sum(line.elements for line in group):,}",
            f"{sum(line.differences for line in group):,}",
            Text(verdict, style=_COLOURS[first.verdict]),
        )
    return table


def _alike(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Lines for one row: a family's that pass, those absent for one reason, each that fails."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        kind = (line.producer, line.verdict)
        if line.verdict == "pass":
            key = (*kind, line.family)
        elif line.verdict == "not here":
            key = (*kind, line.reason)
        else:
            key = (*kind, line.family, line.key, line.route)
        groups.setdefault(key, []).append(line)
    yield from groups.values()


def _failures(lines: Iterable[Line]) -> Table:
    table = Table("differs", "first difference", title="differences", title_justify="left")
    for line in lines:
        what = f"{line.producer} {line.family} -> {line.key}, {line.route}"
        table.add_row(Text(what), Text(str(line.first)))
    return table
