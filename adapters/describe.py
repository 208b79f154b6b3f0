"""What an adapter folder holds, told without a base model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import AdapterError
from ..core.report import ReportPart
from .assemble import assemble, base_need
from .base import BaseFacts, TargetEmbedding, TargetLayer
from .config_file import ParsedConfig, parse_config
from .contents import ModuleContent, contents_of, planned_contents, stored_contents
from .findings import raise_findings
from .names import NameParser
from .pickle_file import PickleFile
from .read import checked_plan, open_tensors, read_raw_config
from .tensor_file import TensorFile, TensorHeader

# No slots, no limit: above every rank that a config may name.
_ANY_RANK = 2**31


class AdapterSummary(ReportPart):
    """An adapter folder.

    Attributes:
        peft_type: as the config names it.
        base_model: the base model as the config names it.
        task: the config's task type.
        rank: the config's rank, before patterns.
        alpha: the config's `lora_alpha`, before patterns.
        targets: the config's `target_modules`: names, or one pattern; empty where PEFT's default
            for the base model counts.
        modules: what it holds for each of them.
        dtypes: safetensors' names of the tensors' dtypes.
        parameters: how many numbers the tensors hold.
        nbytes: size of the tensor file.
        digest: BLAKE3 of what the adapter computes on a model that names its layers as the
            adapter does; None where something is wrong, or where it takes the base model to tell.
        notes: what a listing says.
        problem: why no model can load it; None where one can.
    """

    peft_type: str | None
    base_model: str | None
    task: str | None
    rank: int | None
    alpha: float | None
    targets: tuple[str, ...]
    modules: tuple[ModuleContent, ...]
    dtypes: tuple[str, ...]
    parameters: int
    nbytes: int
    digest: str | None
    notes: tuple[str, ...]
    problem: str | None


def describe_adapter(path: str | Path, *, label: str | None = None) -> AdapterSummary:
    """Read an adapter folder and check all that can be checked without its base model.

    Args:
        path: the folder.
        label: what messages call it; None for its path.

    Raises:
        AdapterNotFoundError: there is no such folder.
        AdapterFormatError: config or tensors are missing, no JSON, no safetensors file, or a pickle
            of more than tensors.
    """
    folder, subject = Path(path), f"adapter {label or os.fspath(path)!r}"
    raw = read_raw_config(folder, subject)
    with open_tensors(folder, subject) as file:
        parsed, parser, told, problem = None, _LORA, None, None
        try:
            parsed = parse_config(raw, subject)
            parser = NameParser(
                parsed.tuner.parts(parsed.config), parsed.tuner.shared(parsed.config)
            )
            told = _told(parsed, _modules(parser, file.headers), file, subject)
        except AdapterError as error:
            problem = str(error)
        if told is None or told.modules is None:
            # Of settings that are refused no rank is told.
            known = parsed if told is not None else None
            modules = stored_contents(known, file.headers, parser)
            told = _Told(modules, None, told.notes if told else ())
        return _summary(raw, file, told, problem)


# Of a config that cannot be read, what it would most likely be of.
_LORA = NameParser({"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"})
_Modules = Mapping[str, Mapping[str, TensorHeader]]


class _Told(NamedTuple):
    """What the files tell without a base model."""

    modules: tuple[ModuleContent, ...] | None = None
    digest: str | None = None
    notes: tuple[str, ...] = ()


def _modules(parser: NameParser, headers: Sequence[TensorHeader]) -> _Modules:
    found: dict[str, dict[str, TensorHeader]] = {}
    for header in headers:
        part = parser.parse(header.name)
        if part is not None and part.module:
            found.setdefault(part.module, {})[part.part] = header
    return found


def _told(
    parsed: ParsedConfig, modules: _Modules, file: TensorFile | PickleFile, subject: str
) -> _Told:
    facts = None if _is_mixed(parsed, file.headers) else _own_facts(parsed, modules)
    if facts is None:
        raise_findings(subject, parsed.findings)
        return _Told(notes=("its tensors are checked on a model only",))
    if parsed.config.target_modules is None:
        # PEFT's default goes by the base model's type, which is not known here.
        config = parsed.config.model_copy(update={"target_modules": list(facts.targets)})
        parsed = parsed._replace(config=config)
    plan = checked_plan(parsed, file.headers, facts, max_rank=_ANY_RANK, subject=subject)
    need = base_need(plan)
    if need is not None:
        notes = (*plan.notes, f"{need} is computed with the weights of the base model")
        return _Told(planned_contents(plan), notes=notes)
    weights = assemble(plan, file.read, source=subject, subject=subject)
    return _Told(contents_of(weights, facts.targets), weights.digest, weights.notes)


def _is_mixed(parsed: ParsedConfig, headers: Sequence[TensorHeader]) -> bool:
    """Whether it holds more than its type's own tensors, which do not tell what they are of."""
    config = parsed.config
    rows = config.trainable_token_indices is not None or not parsed.tuner.selects_targets
    copies = any(".base_layer." in header.name for header in headers)
    # Names of a parameter's tensors tell their nesting, and not the parameter.
    parameters = bool(getattr(config, "target_parameters", None))
    return rows or copies or parameters or bool(config.modules_to_save)


def _own_facts(parsed: ParsedConfig, found: _Modules) -> BaseFacts | None:
    """A base model that has the modules which the tensors are of, and nothing else.

    None where the tensors tell too little of them.
    """
    layers, embeddings = {}, {}
    for name, parts in found.items():
        if table := _table(parts):
            embeddings[name] = TargetEmbedding(name, *table)
            continue
        sizes = parsed.tuner.sizes(parsed.config, parts)
        if sizes is None:
            return None
        layers[name] = TargetLayer(name, *sizes)
    task = parsed.config.task_type or ""
    return BaseFacts(layers, (*layers, *embeddings), task, None, "", embeddings)


def _table(parts: Mapping[str, TensorHeader]) -> tuple[int, int] | None:
    """V and D of an embedding with a LoRA on it; None for any other module."""
    a, b = parts.get("lora_embedding_A"), parts.get("lora_embedding_B")
    if a is None and b is None:
        return None
    return (a.shape[-1] if a and a.shape else 0), (b.shape[0] if b and b.shape else 0)


def _summary(
    raw: dict[str, Any], file: TensorFile | PickleFile, told: _Told, problem: str | None
) -> AdapterSummary:
    headers = file.headers
    return AdapterSummary(
        peft_type=_field(raw, "peft_type", str),
        base_model=_field(raw, "base_model_name_or_path", str),
        task=_field(raw, "task_type", str),
        rank=_field(raw, "r", int),
        alpha=_field(raw, "lora_alpha", int, float),
        targets=_targets(raw),
        modules=told.modules or (),
        dtypes=tuple(dict.fromkeys(header.dtype for header in headers)),
        parameters=sum(math.prod(header.shape) for header in headers),
        nbytes=file.nbytes,
        digest=told.digest,
        notes=told.notes,
        problem=problem,
    )


# The raw config may be of any tool: what is not of the type that PEFT writes is left out here, and
# named by the problem.


def _field(raw: dict[str, Any], key: str, *kinds: type) -> Any:
    value = raw.get(key)
    return value if type(value) in kinds else None


def _targets(raw: dict[str, Any]) -> tuple[str, ...]:
    value = raw.get("target_modules")
    entries = value if isinstance(value, list) else [value]
    return tuple(entry for entry in entries if isinstance(entry, str))
