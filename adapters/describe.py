"""What an adapter folder holds, told without a base model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..core.errors import AdapterError
from .base import BaseFacts, TargetLayer
from .check import TensorHeader
from .lora_config import LoraConfigFile, ParsedConfig, parse_lora_config
from .names import HalfName, parse_half
from .read import assemble, checked_plan, open_tensors, read_raw_config
from .tensor_file import TensorFile
from .weights import AdapterWeights

# No slots, no limit: above every rank that a config may name.
_ANY_RANK = 2**31


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class AdapterLayer(_Part):
    """One layer of an adapter.

    Attributes:
        name: as the adapter names it, without PEFT's prefix.
        rank: of its product.
        scaling: that the product is multiplied with.
        shape: (N, K) of the linear that it was trained on.
    """

    name: str
    rank: int
    scaling: float
    shape: tuple[int, int]


class AdapterSummary(_Part):
    """An adapter folder.

    Attributes:
        peft_type: as the config names it.
        base_model: the base model as the config names it.
        task: the config's task type.
        rank: the config's rank, before patterns.
        alpha: the config's `lora_alpha`, before patterns.
        targets: the config's `target_modules`: names, or one pattern; empty where PEFT's default
            for the base model counts.
        layers: those found in the tensors; empty where something is wrong.
        modules: names of all modules that tensors of a LoRA branch lie below.
        dtypes: safetensors' names of the tensors' dtypes.
        parameters: how many numbers the tensors hold.
        nbytes: size of the tensor file.
        digest: SHA-256 of what the adapter computes on a model that names its layers as the
            adapter does; None where something is wrong.
        notes: what a listing says.
        problem: why no model can load it; None where one can.
    """

    peft_type: str | None
    base_model: str | None
    task: str | None
    rank: int | None
    alpha: float | None
    targets: tuple[str, ...]
    layers: tuple[AdapterLayer, ...]
    modules: tuple[str, ...]
    dtypes: tuple[str, ...]
    parameters: int
    nbytes: int
    digest: str | None
    notes: tuple[str, ...]
    problem: str | None


def describe_adapter(path: str | Path) -> AdapterSummary:
    """Read an adapter folder and check all that can be checked without its base model.

    Raises:
        AdapterNotFoundError: there is no such folder.
        AdapterFormatError: config or tensors are missing, or no JSON and no safetensors file.
        AdapterUnsupportedError: the tensors are pickled.
    """
    folder, subject = Path(path), f"adapter {os.fspath(path)!r}"
    raw = read_raw_config(folder, subject)
    with open_tensors(folder, subject) as file:
        weights, problem = None, None
        try:
            weights = _weights(raw, file, subject)
        except AdapterError as error:
            problem = str(error)
        return _summary(raw, file, weights, problem)


def _weights(raw: dict[str, Any], file: TensorFile, subject: str) -> AdapterWeights:
    parsed = parse_lora_config(raw, subject)
    facts = _own_facts(parsed.config, file.headers)
    if parsed.config.target_modules is None:
        # PEFT's default goes by the base model's type, which is not known here.
        config = parsed.config.model_copy(update={"target_modules": list(facts.layers)})
        parsed = ParsedConfig(config, parsed.findings, parsed.refused)
    plan = checked_plan(parsed, file.headers, facts, max_rank=_ANY_RANK, subject=subject)
    return assemble(plan, file.read, source=subject, subject=subject)


def _own_facts(config: LoraConfigFile, headers: Sequence[TensorHeader]) -> BaseFacts:
    """A base model that has the layers which the tensors are of, and nothing else."""
    sizes: dict[str, dict[str, int]] = {}
    for half, header in _halves(headers):
        # The outer size of each half; what is no matrix is refused before it counts.
        outer = header.shape[-1:] if half.half == "lora_A" else header.shape[:1]
        sizes.setdefault(half.module, {})[half.half] = outer[0] if outer else 0
    layers = {
        name: TargetLayer(name, found.get("lora_A", 0), found.get("lora_B", 0))
        for name, found in sizes.items()
    }
    return BaseFacts(layers, tuple(layers), config.task_type or "", None, "")


def _halves(headers: Sequence[TensorHeader]) -> list[tuple[HalfName, TensorHeader]]:
    halves = [(parse_half(header.name), header) for header in headers]
    return [(half, header) for half, header in halves if half is not None]


def _summary(
    raw: dict[str, Any], file: TensorFile, weights: AdapterWeights | None, problem: str | None
) -> AdapterSummary:
    headers = file.headers
    layers = () if weights is None else _layers(weights)
    return AdapterSummary(
        peft_type=_field(raw, "peft_type", str),
        base_model=_field(raw, "base_model_name_or_path", str),
        task=_field(raw, "task_type", str),
        rank=_field(raw, "r", int),
        alpha=_field(raw, "lora_alpha", int, float),
        targets=_targets(raw),
        layers=layers,
        modules=tuple(dict.fromkeys(half.module for half, _ in _halves(headers))),
        dtypes=tuple(dict.fromkeys(header.dtype for header in headers)),
        parameters=sum(math.prod(header.shape) for header in headers),
        nbytes=file.nbytes,
        digest=None if weights is None else weights.digest,
        notes=() if weights is None else weights.notes,
        problem=problem,
    )


def _layers(adapter: AdapterWeights) -> tuple[AdapterLayer, ...]:
    return tuple(
        AdapterLayer(
            name=name,
            rank=part.rank,
            scaling=part.scaling,
            shape=(part.b.shape[0], part.a.shape[1]),
        )
        for name, weights in adapter.layers.items()
        if (part := weights.low_rank) is not None
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
