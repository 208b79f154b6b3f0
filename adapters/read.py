"""Reading a PEFT adapter folder: headers first, all checks, and only then the tensors (I8)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..core.errors import AdapterFormatError, AdapterNotFoundError, AdapterUnsupportedError
from .base import BaseFacts
from .check import LoadPlan, TensorHeader, plan_load
from .findings import damaged, raise_findings
from .lora_config import CONFIG_NAME, ParsedConfig, load_config, parse_lora_config
from .tensor_file import TensorFile, open_regular, read_exactly
from .weights import AdapterWeights, LayerWeights, LowRank, content_digest, effect_note

TENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"

# Real ones have a few kilobytes; "all-linear" on a large model spells out a few hundred names.
_LONGEST_CONFIG = 16 * 2**20


def read_adapter(path: str | Path, base: BaseFacts, *, max_rank: int) -> AdapterWeights:
    """Read a LoRA adapter that PEFT saved, checked against a base model.

    Nothing is read but `adapter_config.json` and `adapter_model.safetensors` in that folder, and
    no tensor before names, shapes, dtypes, ranks, targets and task are checked. The returned
    tensors are as stored, on the CPU, and own their memory.

    Args:
        path: the folder.
        base: facts about the model it is to be loaded on.
        max_rank: the rank the slots were sized for.

    Raises:
        AdapterNotFoundError: there is no such folder.
        AdapterFormatError: the files are damaged, incomplete, unreadable or of another tool.
        AdapterUnsupportedError: it uses a feature, a dtype or a layer that is not served.
        AdapterMismatchError: it is for another base model or another task.
        AdapterCapacityError: its rank exceeds `max_rank`.
    """
    folder = Path(path)
    subject = f"adapter {os.fspath(path)!r}"
    parsed = parse_lora_config(read_raw_config(folder, subject), subject)
    with open_tensors(folder, subject) as file:
        plan = checked_plan(parsed, file.headers, base, max_rank=max_rank, subject=subject)
        return assemble(plan, file.read, source=os.fspath(path), subject=subject)


def read_raw_config(folder: Path, subject: str) -> dict[str, Any]:
    """The decoded, unchecked adapter_config.json of a folder.

    Args:
        folder: of the adapter.
        subject: what errors are about.

    Raises:
        AdapterNotFoundError: there is no such folder.
        AdapterFormatError: the file is missing, unreadable, too long or no JSON object.
    """
    if not _is_folder(folder, subject):
        raise AdapterNotFoundError(subject, "there is no such folder", "check the path")
    return load_config(_read_config(folder / CONFIG_NAME, subject), subject)


def checked_plan(
    parsed: ParsedConfig,
    headers: list[TensorHeader],
    base: BaseFacts,
    *,
    max_rank: int,
    subject: str,
) -> LoadPlan:
    """Check config and headers; raise one error that lists all findings, or return the plan.

    Raises:
        AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError, AdapterCapacityError:
            as in `read_adapter`.
    """
    plan, findings = plan_load(
        parsed.config, headers, base, max_rank=max_rank, explained=parsed.refused
    )
    raise_findings(subject, [*parsed.findings, *findings])
    return plan


def assemble(
    plan: LoadPlan, fetch: Callable[[str], torch.Tensor], *, source: str, subject: str
) -> AdapterWeights:
    """Fetch the tensors of a plan and make the adapter.

    Args:
        plan: from `checked_plan`.
        fetch: gives a tensor by its name in the file.
        source: what `AdapterWeights.source` says.
        subject: what errors are about.

    Raises:
        AdapterFormatError: a tensor holds NaN or infinity, or cannot be read.
    """
    findings = []
    layers = {}
    for name, planned in plan.layers.items():
        weights = LowRank(fetch(planned.a), fetch(planned.b), planned.scaling)
        for tensor_name, tensor in ((planned.a, weights.a), (planned.b, weights.b)):
            if not torch.isfinite(tensor).all():
                what = "NaN" if torch.isnan(tensor).any() else "infinity"
                text = f"tensor {tensor_name!r} holds {what}"
                findings.append(damaged(text, "train or save the adapter again"))
        layers[name] = LayerWeights(weights)
    raise_findings(subject, findings)
    effect = effect_note(layers)
    notes = plan.notes if effect is None else (*plan.notes, effect)
    return AdapterWeights(source, content_digest(layers), MappingProxyType(layers), notes)


def _is_folder(folder: Path, subject: str) -> bool:
    try:
        return folder.is_dir()
    except OSError as error:
        reason = f"the folder cannot be read ({error})"
        raise AdapterFormatError(subject, reason, "check the path and its permissions") from error


def _read_config(path: Path, subject: str) -> bytes:
    with open_regular(path, subject) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LONGEST_CONFIG:
            raise AdapterFormatError(
                subject,
                f"{path.name} has {size} bytes, more than any config",
                f"restore {path.name} as PEFT wrote it",
            )
        data = bytearray(size)
        read_exactly(file, data, path.name, subject)
        return bytes(data)


def open_tensors(folder: Path, subject: str) -> TensorFile:
    """The tensors of an adapter folder, their headers read and checked.

    Args:
        folder: of the adapter.
        subject: what errors are about.

    Raises:
        AdapterFormatError: the file is missing, unreadable or no well-formed safetensors file.
        AdapterUnsupportedError: the tensors are pickled.
    """
    path = folder / TENSORS_NAME
    if not os.path.lexists(path) and os.path.lexists(folder / PICKLE_NAME):
        raise AdapterUnsupportedError(
            subject,
            f"has only {PICKLE_NAME}, a pickle; only safetensors are read",
            "convert it: load it once with PEFT where you trust it, then "
            "save_pretrained(folder, safe_serialization=True)",
        )
    return TensorFile(path, subject)
