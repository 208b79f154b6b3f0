"""`branchline generate`: one mixed batch of base and adapter rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.errors import BatchError, WrapError
from ..policies.audit import AuditReport
from ..serving.config import WrapConfig
from ..serving.model import ServedModel
from .options import with_settings
from .output import console, note, print_json, results_only_on_stdout
from .prompts import BASE, SYNTAX, Row, encode, parse_rows
from .session import AdapterOption, CalibrationOption, JsonOption, ModelArgument, Session

SCHEMA_VERSION = 1

PromptOption = Annotated[
    list[str],
    typer.Option("--prompt", metavar="[@NAME ]TEXT", help=f"{SYNTAX} Repeatable."),
]
TokensOption = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Do not put the prompts into the model's chat template.")
]


class Answer(BaseModel):
    """One row of the batch; `adapter` is null for the base model."""

    row: int
    adapter: str | None
    prompt: str
    answer: str
    tokens: int


class GenerateReport(BaseModel):
    """What `branchline generate --json` prints.

    Attributes:
        schema_version: of this document.
        answers: in the order of the rows.
        sites: how many sites took each route.
        fallbacks: how many calls passed over the planned producer, by reason.
    """

    schema_version: int = SCHEMA_VERSION
    answers: list[Answer]
    sites: dict[str, int]
    fallbacks: dict[str, int]


@with_settings(WrapConfig)
def generate(
    model: ModelArgument,
    *,
    prompt: PromptOption,
    adapter: AdapterOption = None,
    max_new_tokens: TokensOption = 64,
    raw: RawOption = False,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
    settings: WrapConfig,
) -> None:
    """Answer a mixed batch of base and adapter rows with one greedy generate call.

    Example: branchline generate MODEL --adapter sql=adapters/sql --prompt "Count the users."
    """
    session = Session(model, adapter or (), calibration, settings)
    try:
        rows = parse_rows(prompt, session.names)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--prompt") from error
    with results_only_on_stdout():
        report = _run(session, rows, max_new_tokens, raw)
    if json:
        print_json(report.model_dump_json(indent=2))
    else:
        _render(report, console())


def _run(session: Session, rows: Sequence[Row], max_new_tokens: int, raw: bool) -> GenerateReport:
    inputs = encode(session.tokenizer, [row.prompt for row in rows], raw=raw)
    served = session.serve()
    _check_can_answer(served, inputs["input_ids"].shape[1] + max_new_tokens)
    note(f"generating {len(rows)} rows")
    names = [row.adapter for row in rows]
    with torch.inference_mode():
        out = served.generate(
            **{name: tensor.to(served.device) for name, tensor in inputs.items()},
            adapter_names=names,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=session.tokenizer.pad_token_id,
        )
    made = out[:, inputs["input_ids"].shape[1] :].tolist()
    stops = _stop_tokens(served)
    answers = [
        _answer(i, row, _until_stop(tokens, stops), session.tokenizer)
        for i, (row, tokens) in enumerate(zip(rows, made, strict=True))
    ]
    used = tuple(dict.fromkeys(name for name in names if name is not None))
    ran = served.audit(adapter_sets=[used])
    return GenerateReport(answers=answers, sites=_sites(ran), fallbacks=_fallbacks(ran))


def _check_can_answer(served: ServedModel, tokens: int) -> None:
    config = served.config
    if not served.can_generate() or config.is_encoder_decoder:
        raise WrapError(
            f"model {type(served.model).__name__}",
            "does not continue a prompt",
            "pass a decoder-only language model",
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise BatchError(
            f"a batch of up to {tokens} tokens a row",
            f"but the model has {positions} positions",
            "shorten the prompts, or pass a lower --max-new-tokens",
        )


def _stop_tokens(served: ServedModel) -> set[int]:
    stop = served.generation_config.eos_token_id
    return set(stop) if isinstance(stop, list) else {stop}


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    """What follows the first stop token is padding."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def _answer(index: int, row: Row, tokens: list[int], tokenizer: Any) -> Answer:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Answer(
        row=index, adapter=row.adapter, prompt=row.prompt, answer=text, tokens=len(tokens)
    )


def _sites(ran: AuditReport) -> dict[str, int]:
    return dict(Counter(route for site in ran.sites for route in site.ran))


def _fallbacks(ran: AuditReport) -> dict[str, int]:
    total: Counter[str] = Counter()
    for site in ran.sites:
        total.update(site.fallbacks)
    return dict(total)


def _render(report: GenerateReport, out: Console) -> None:
    table = Table("row", "adapter", "prompt", "answer", show_lines=True)
    for answer in report.answers:
        name = Text(answer.adapter or BASE)
        # Text, because square brackets in a string are markup.
        table.add_row(str(answer.row), name, Text(answer.prompt), Text(answer.answer))
    out.print(table)
    out.print(Text("sites: " + _counts(f"{n} ran {r}" for r, n in sorted(report.sites.items()))))
    if report.fallbacks:
        out.print(Text("fell back: " + _counts(f"{r} (x{n})" for r, n in report.fallbacks.items())))


def _counts(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "none"
