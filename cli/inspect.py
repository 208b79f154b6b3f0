"""`branchline inspect`: what a folder or a source is, without loading any weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..adapters.contents import ModuleContent
from ..adapters.describe import AdapterSummary
from ..linear.checkpoint.describe import QuantSummary
from ..serving.config import WrapConfig
from ..serving.inspect import inspect_source
from ..serving.inspect_report import AdapterFileReport, FitReport, LinearSummary, ModelReport
from .options import help_of
from .output import console, note, print_json, results_only_on_stdout
from .session import JsonOption

_Item = TypeVar("_Item")


def _help(field: str) -> str:
    return help_of(WrapConfig.model_fields[field])


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|ADAPTER",
        help="Folder of a checkpoint; or an adapter: a folder, archive or URL, as --adapter takes.",
    ),
]
OnOption = Annotated[
    Path | None,
    typer.Option(metavar="MODEL", help="For an adapter: whether it fits this model, and its cost."),
]
RankOption = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="With --on: highest LoRA rank that fits a slot."),
]
MismatchOption = Annotated[
    bool, typer.Option("--allow-base-mismatch", help=f"With --on: {_help('allow_base_mismatch')}")
]
RootsOption = Annotated[
    list[str] | None, typer.Option("--allowed-roots", help=_help("allowed_roots"))
]
BytesOption = Annotated[
    int | None, typer.Option("--max-adapter-bytes", min=1, help=_help("max_adapter_bytes"))
]


def inspect(
    source: SourceArgument,
    *,
    on: OnOption = None,
    max_lora_rank: RankOption = None,
    allow_base_mismatch: MismatchOption = False,
    allowed_roots: RootsOption = None,
    max_adapter_bytes: BytesOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a folder is: how a model is quantised, or what an adapter holds and costs.

    Reads metadata, headers and adapters, no weights of a model.  Exit code 1 where the folder
    contradicts itself, or the adapter does not fit.
    """
    for flag, given in (
        ("--max-lora-rank", max_lora_rank is not None),
        ("--allow-base-mismatch", allow_base_mismatch),
    ):
        if given and on is None:
            raise typer.BadParameter("it goes with --on", param_hint=flag)
    settings = {
        "max_lora_rank": max_lora_rank,
        "allow_base_mismatch": allow_base_mismatch or None,
        "allowed_roots": allowed_roots or None,
        "max_adapter_bytes": max_adapter_bytes,
    }
    typed = {name: value for name, value in settings.items() if value is not None}
    with results_only_on_stdout():
        report = inspect_source(source, on=on, **typed)
    if json:
        print_json(report.model_dump_json(indent=2))
    elif isinstance(report, ModelReport):
        _print_model(report, console())
    else:
        _print_adapter(report, console())
    if report.problem is not None:
        said = report.folder if isinstance(report, ModelReport) else report.source
        note(f"error: {said} cannot be loaded{'' if on is None else f' on {on}'}")
        raise typer.Exit(1)


# --- models ------------------------------------------------------------------------------------


def _print_model(report: ModelReport, out: Console) -> None:
    files = f"{len(report.files)} file{'' if len(report.files) == 1 else 's'}"
    _line(
        out,
        f"model {report.architecture}, {report.dtype or 'dtype unknown'}, "
        f"{report.parameters:,} parameters, {report.nbytes:,} bytes in {files}",
    )
    quantization = report.quantization
    if quantization is not None:
        _print_quantization(quantization, out)
    if report.linears:
        _print_linears(report.linears, out)
    _print_problem(report.problem, out)


def _print_quantization(summary: QuantSummary, out: Console) -> None:
    _line(out, f"{summary.method}, by {summary.source}: {', '.join(summary.says)}")
    if summary.schemes:
        table = Table("scheme", _right("linears"), _right("bytes"), box=None)
        for scheme in summary.schemes:
            table.add_row(Text(scheme.scheme), f"{len(scheme.linears):,}", f"{scheme.nbytes:,}")
        out.print(table)
        _listing("linears that stay unquantised", _grouped(summary.unquantized), out)
    _listing("ignored, but names no linear", summary.unmatched, out)
    notes = list(summary.decisions)
    if summary.kv_cache_scales:
        notes.append(f"{summary.kv_cache_scales} tensors are scales of the KV cache and not used")
    _listing("decided", notes, out)


def _print_linears(linears: Iterable[LinearSummary], out: Console) -> None:
    _line(out, "unquantised; what wrapping or `quantize` could quantise:")
    table = Table("linears", _right("N x K"), _right("weights"), "left as they are", box=None)
    for name, alike in _alike(linears, attrgetter("name"), attrgetter("shape", "left", "experts")):
        (rows, columns), experts = alike[0].shape, alike[0].experts
        weights = f"{len(alike) * max(experts, 1) * rows * columns:,}"
        each = f", of {experts} experts each" if experts else ""
        table.add_row(
            Text(f"{name}{each}"), f"{rows} x {columns}", weights, Text(alike[0].left or "")
        )
    out.print(table)


# --- adapters ----------------------------------------------------------------------------------


def _print_adapter(report: AdapterFileReport, out: Console) -> None:
    summary = report.adapter
    _line(
        out,
        f"adapter {summary.peft_type or '(no type)'}, {'/'.join(summary.dtypes)}, "
        f"{summary.parameters:,} parameters, {summary.nbytes:,} bytes",
    )
    _line(out, f"base model {summary.base_model or '(not named)'}, task {summary.task or '(none)'}")
    _print_config(summary, out)
    on_model = () if report.on is None else report.on.modules
    _print_modules(on_model or summary.modules, out)
    digest = summary.digest if report.on is None else report.on.digest
    if digest is not None:
        _line(out, f"digest {digest}")
    _listing("notes", summary.notes if report.on is None else report.on.notes, out)
    if report.on is not None:
        _print_fit(report.on, out)
    _print_problem(report.problem, out)


def _print_config(summary: AdapterSummary, out: Console) -> None:
    targets = ", ".join(summary.targets) or "PEFT's default for the base model"
    known = [f"rank {summary.rank}"] if summary.rank else []
    known += [] if summary.alpha is None else [f"alpha {summary.alpha:g}"]
    _line(out, ", ".join([*known, f"targets {targets}"]))


def _print_modules(modules: Iterable[ModuleContent], out: Console) -> None:
    columns = ("modules", "parts", _right("rank"), _right("scaling"), _right("shape"), "reads raw")
    table = Table(*columns, box=None)
    kind = attrgetter("kind", "parts", "rank", "scaling", "shape", "reads_raw")
    for name, alike in _alike(modules, attrgetter("name"), kind):
        first = alike[0]
        table.add_row(
            Text(name),
            Text(", ".join(first.parts)),
            "" if first.rank is None else str(first.rank),
            "" if first.scaling is None else f"{first.scaling:g}",
            "" if first.shape is None else " x ".join(map(str, first.shape)),
            {True: "yes", False: "no", None: "?"}[first.reads_raw],
        )
    if table.row_count:
        out.print(table)


def _print_fit(fit: FitReport, out: Console) -> None:
    where = f"on {fit.folder} ({fit.architecture})"
    if fit.problem is not None:
        _line(out, f"{where}: does not fit")
        return
    size = "memory that a load tells" if fit.slot_nbytes is None else f"{fit.slot_nbytes:,} bytes"
    _line(
        out,
        f"{where}: fits; a slot of rank {fit.max_lora_rank} takes {size}, and its batches read "
        f"{len(fit.raw)} of {fit.linears_of_model} linears raw",
    )
    _line(out, "which sites that unfuses is known once the model runs: see `branchline audit`")


# --- for both ----------------------------------------------------------------------------------


def _line(out: Console, text: str) -> None:
    # Not markup, since names of a checkpoint may hold brackets, and not broken where a pipe ends.
    out.print(Text(text), soft_wrap=True)


def _print_problem(problem: str | None, out: Console) -> None:
    if problem is not None:
        text = f"refused: {' '.join(problem.split())}"
        out.print(Text(text, style="red"), soft_wrap=True)


def _listing(title: str, entries: Iterable[str], out: Console) -> None:
    texts = list(entries)
    if texts:
        _line(out, f"{title}:")
    for text in texts:
        _line(out, f"  {text}")


def _right(title: str) -> Column:
    return Column(title, justify="right")


def _grouped(names: Iterable[str]) -> list[str]:
    return [name for name, _ in _alike(names, str, lambda _: None)]


def _alike(
    items: Iterable[_Item], name_of: Callable[[_Item], str], kind_of: Callable[[_Item], Hashable]
) -> Iterator[tuple[str, list[_Item]]]:
    """Items of one kind whose names differ in the number of their layer only, together."""
    groups: dict[tuple[str, Hashable], list[_Item]] = {}
    for item in items:
        parts = name_of(item).split(".")
        pattern = ".".join("*" if part.isdigit() else part for part in parts)
        groups.setdefault((pattern, kind_of(item)), []).append(item)
    for (pattern, _), found in groups.items():
        yield f"{pattern} (x{len(found)})" if len(found) > 1 else name_of(found[0]), found
