"""What a folder is: a quantised model, or an adapter and its cost; no weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..adapters.assemble import base_need
from ..adapters.base import BaseFacts, TargetLayer
from ..adapters.branch import LayerBranch, check_range
from ..adapters.describe import AdapterSummary, describe_adapter
from ..adapters.embedding import EmbeddingBranch
from ..adapters.read import read_adapter, read_plan
from ..adapters.slots import SlotClasses
from ..adapters.weights import AdapterWeights
from ..core.errors import (
    AdapterError,
    BranchlineError,
    CheckpointError,
    ConfigError,
    ScaleError,
    WrapError,
)
from ..linear.checkpoint import CheckpointQuant, ResolvedQuant, TensorHeader, read_metadata
from ..linear.checkpoint.describe import QuantSummary, check_shapes, describe_quant
from ..linear.weights import LinearModule, kind_refusal, linear_shape
from .base_facts import base_facts
from .checkpoint_names import checkpoint_names
from .config import WrapConfig
from .folder import (
    UNREADABLE,
    check_folder,
    model_class,
    read_config,
    unreadable,
    without_quantization,
)
from .load import refuse_codes
from .quantized_loader import refuse_leftovers, refuse_tied, stored_linears
from .shards import has_shards, read_headers, shard_files

SCHEMA_VERSION = 1
_MODEL, _ADAPTER = "config.json", "adapter_config.json"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: What speaks against a checkpoint that could be read.
_FINDINGS = (CheckpointError, ScaleError)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class LinearSummary(_Part):
    """One linear of an unquantised model.

    Attributes:
        name: in the model.
        shape: (N, K).
        left: why quantising leaves it as it is; None where it does not.
    """

    name: str
    shape: tuple[int, int]
    left: str | None


class ModelReport(_Part):
    """What `inspect` tells of a model's folder.

    Attributes:
        schema_version: of this document.
        kind: "model".
        folder: that was inspected.
        architecture: the model class.
        dtype: of what is not quantised; None where neither config nor headers say.
        parameters: of the model; shared ones count once.
        files: names of the files that hold its weights.
        nbytes: of these files.
        quantization: None where no metadata speaks of any.
        linears: of a model that is not quantised.
        problem: why it cannot be loaded; None where nothing speaks against it.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Literal["model"] = "model"
    folder: str
    architecture: str
    dtype: str | None
    parameters: int
    files: tuple[str, ...]
    nbytes: int
    quantization: QuantSummary | None
    linears: tuple[LinearSummary, ...]
    problem: str | None


class FitReport(_Part):
    """An adapter on one model.

    Attributes:
        folder: of the model.
        architecture: of the model.
        linears_of_model: how many linears it has.
        raw: names of the linears that a batch with this adapter reads raw; empty if it does not
            fit.
        digest: of the adapter on this model; None where it hangs on the weights as they are served.
        max_lora_rank: that slots are sized for.
        slot_nbytes: of one slot in all that the adapter has parts of; None where the digest is, the
            model's dtype is unknown or the adapter does not fit.
        notes: what a listing says.
        problem: why it cannot be loaded there; None where it can.
    """

    folder: str
    architecture: str
    linears_of_model: int
    raw: tuple[str, ...]
    digest: str | None
    max_lora_rank: int
    slot_nbytes: int | None
    notes: tuple[str, ...]
    problem: str | None


class AdapterReport(_Part):
    """What `inspect` tells of an adapter's folder.

    Attributes:
        schema_version: of this document.
        kind: "adapter".
        folder: that was inspected.
        adapter: what it holds.
        on: what it is on a model; None where none was named.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Literal["adapter"] = "adapter"
    folder: str
    adapter: AdapterSummary
    on: FitReport | None

    @property
    def problem(self) -> str | None:
        """Why it cannot be loaded: on the model that was named, or on any."""
        return self.adapter.problem if self.on is None else self.on.problem


def inspect_folder(
    folder: str | Path, *, on: str | Path | None = None, max_lora_rank: int | None = None
) -> ModelReport | AdapterReport:
    """Tell what lies in a folder.

    Args:
        folder: of a model, or of an adapter.
        on: for an adapter, the folder of the model to try it on.
        max_lora_rank: rank that slots are sized for; None for the default of `wrap`.

    Raises:
        WrapError: no folder, one of neither a model nor an adapter, one of both, or a model that
            transformers cannot read.
        ConfigError: `on` or `max_lora_rank` for a model.
        CheckpointError: files of weights that are missing or damaged.
        AdapterError: files of the adapter that are missing or damaged.
    """
    folder = Path(folder)
    if not _is_adapter(folder):
        if on is not None or max_lora_rank is not None:
            given = "on" if on is not None else "max_lora_rank"
            raise ConfigError(given, f"is for an adapter, {str(folder)!r} is a model", "drop it")
        return _inspect_model(folder)
    summary = describe_adapter(folder)
    fit = None if on is None else _try_on(folder, Path(on), max_lora_rank)
    return AdapterReport(folder=str(folder), adapter=summary, on=fit)


def _is_adapter(folder: Path) -> bool:
    subject = f"folder {str(folder)!r}"
    if not folder.is_dir():
        reason = "is no folder" if folder.exists() else "does not exist"
        raise WrapError(subject, reason, "pass the folder of a model or of an adapter")
    found = [name for name in (_MODEL, _ADAPTER) if (folder / name).is_file()]
    if not found:
        reason = f"holds neither {_MODEL} nor {_ADAPTER}, so it is no model and no adapter"
        raise WrapError(subject, reason, "pass the folder of a model or of an adapter")
    if len(found) > 1:
        reason = f"holds both {_MODEL} and {_ADAPTER}: a model and an adapter"
        raise WrapError(subject, reason, "give each a folder of its own")
    return found == [_ADAPTER]


@dataclass(frozen=True)
class _Skeleton:
    """A checkpoint without its values.

    Attributes:
        folder: of the checkpoint.
        config: what it says of the model.
        model: of that config, on the meta device.
    """

    folder: Path
    config: PreTrainedConfig
    model: PreTrainedModel

    @classmethod
    def of(cls, folder: Path) -> _Skeleton:
        check_folder(folder)
        try:
            config = without_quantization(read_config(folder))
            with torch.device("meta"):
                return cls(folder, config, model_class(config, folder)(config))
        except BranchlineError:
            raise
        except UNREADABLE as error:
            raise unreadable(folder, error) from error

    @cached_property
    def headers(self) -> dict[str, TensorHeader]:
        """Of all tensors; empty where the weights are no safetensors files."""
        return read_headers(self.files) if has_shards(self.folder) else {}

    @cached_property
    def files(self) -> list[Path]:
        """That hold the weights."""
        if has_shards(self.folder):
            return shard_files(self.folder)
        return sorted(self.folder.glob("pytorch_model*.bin"))

    @cached_property
    def facts(self) -> BaseFacts:
        """For adapters."""
        return base_facts(self.model)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of what is not quantised, as loading chooses it."""
        if self.config.dtype in _FLOATS:
            return self.config.dtype
        floats = {
            header.dtype
            for name, header in self.headers.items()
            if name.endswith(".weight") and header.dtype in _FLOATS
        }
        return floats.pop() if len(floats) == 1 else None


# --- models ------------------------------------------------------------------------------------


def _inspect_model(folder: Path) -> ModelReport:
    skeleton = _Skeleton.of(folder)
    # Files that cannot be read are no finding about a model: there is nothing to tell.
    headers = skeleton.headers if skeleton.files else read_headers(shard_files(folder))
    quantization, problem = _quantization(skeleton, headers)
    plain = problem is None and not (quantization and quantization.schemes)
    return ModelReport(
        folder=str(folder),
        architecture=type(skeleton.model).__name__,
        dtype=None if skeleton.dtype is None else str(skeleton.dtype).removeprefix("torch."),
        parameters=_parameters(skeleton.model),
        files=tuple(file.name for file in skeleton.files),
        nbytes=sum(file.stat().st_size for file in skeleton.files),
        quantization=quantization,
        linears=_linears(skeleton) if plain else (),
        problem=problem,
    )


def _quantization(
    skeleton: _Skeleton, headers: Mapping[str, TensorHeader]
) -> tuple[QuantSummary | None, str | None]:
    """What is quantised, and what contradicts it."""
    metadata = None
    try:
        metadata = read_metadata(skeleton.folder)
        if metadata is None:
            refuse_codes(skeleton.folder)
            return None, None
        # Quantised weights are read from no other files.
        shard_files(skeleton.folder)
        resolved = _resolve(skeleton.model, metadata, headers)
    except _FINDINGS as error:
        said = None if metadata is None else describe_quant(metadata, headers, None)
        return said, str(error)
    return describe_quant(metadata, headers, resolved), None


def _resolve(
    model: PreTrainedModel, metadata: CheckpointQuant, headers: Mapping[str, TensorHeader]
) -> ResolvedQuant:
    """As loading does it, and its checks, as far as they need no values."""
    names = checkpoint_names(model, headers)
    resolved = metadata.resolve(stored_linears(model, names), headers)
    in_model = names.in_model()
    shapes = {}
    for stored in resolved.schemes:
        refuse_tied(model, in_model[stored])
        shapes[stored] = linear_shape(_linear(model, in_model[stored]))
    check_shapes(resolved, headers, shapes)
    refuse_leftovers(headers, resolved)
    return resolved


def _linear(model: nn.Module, name: str) -> LinearModule:
    module = model.get_submodule(name)
    assert isinstance(module, LinearModule)
    return module


def _parameters(model: PreTrainedModel) -> int:
    # Tied weights are not one tensor before values are loaded.
    tied = model.all_tied_weights_keys
    return sum(p.numel() for name, p in model.named_parameters() if name not in tied)


def _linears(skeleton: _Skeleton) -> tuple[LinearSummary, ...]:
    head = skeleton.facts.output_embedding
    found = []
    for name, layer in skeleton.facts.layers.items():
        left = kind_refusal(skeleton.model.get_submodule(name))
        if left is None and name == head:
            left = "it is the output head"
        shape = (layer.out_features, layer.in_features)
        found.append(LinearSummary(name=name, shape=shape, left=left))
    return tuple(found)


# --- adapters ----------------------------------------------------------------------------------


def _try_on(adapter: Path, folder: Path, max_lora_rank: int | None) -> FitReport:
    """Load the adapter as a served model would, and nothing else.

    What is known once the model runs (linears that mix the batch's rows take no adapter) is not
    checked.
    """
    skeleton = _Skeleton.of(folder)
    defaults = WrapConfig()
    max_rank = defaults.max_lora_rank if max_lora_rank is None else max_lora_rank
    refusals = {
        name: reason
        for name in skeleton.facts.layers
        if (reason := kind_refusal(skeleton.model.get_submodule(name))) is not None
    }
    facts = skeleton.facts.with_refusals(refusals)
    dtype = None if skeleton.dtype is None else defaults.lora_dtype.resolve(skeleton.dtype)
    report = FitReport(
        folder=str(folder),
        architecture=type(skeleton.model).__name__,
        linears_of_model=len(facts.layers),
        raw=(),
        digest=None,
        max_lora_rank=max_rank,
        slot_nbytes=None,
        notes=(),
        problem=None,
    )
    try:
        plan = read_plan(adapter, facts, max_rank=max_rank)
        need = base_need(plan)
        if need is not None:
            # Such parts all read the raw activation: it is the base's weights that they change.
            raw = tuple(n for n, p in plan.modules.items() if isinstance(p.target, TargetLayer))
            note = f"{need} is computed with the base's weights: size and digest are told by a load"
            return report.model_copy(update={"raw": raw, "notes": (*plan.notes, note)})
        weights = read_adapter(adapter, facts, max_rank=max_rank)
        if dtype is not None:
            check_range(os.fspath(adapter), weights, dtype)
    except AdapterError as error:
        return report.model_copy(update={"problem": str(error)})
    raw = tuple(name for name, parts in weights.layers.items() if parts.reads_raw)
    found = {"raw": raw, "digest": weights.digest, "notes": weights.notes}
    if dtype is not None:
        found["slot_nbytes"] = _slot_nbytes(facts, weights, max_rank, dtype, skeleton.dtype)
    return report.model_copy(update=found)


def _slot_nbytes(
    facts: BaseFacts,
    weights: AdapterWeights,
    max_rank: int,
    dtype: torch.dtype,
    model_dtype: torch.dtype | None,
) -> int:
    """Of one slot in every module that the adapter has parts of, filled as serving fills it."""
    total, cpu = 0, torch.device("cpu")
    for name, parts in weights.layers.items():
        layer = facts.layers[name]
        sizes = (layer.in_features, layer.out_features)
        branch = LayerBranch(name, SlotClasses((max_rank,)), *sizes, dtype, cpu)
        branch.write(0, parts)
        total += branch.nbytes
    table_dtype = model_dtype or dtype
    for table in weights.embeddings.values():
        embedding = EmbeddingBranch(1.0, dtype, table_dtype, cpu)
        embedding.write(0, table)
        total += embedding.nbytes
    vectors = (v for norm in weights.norms.values() for v in (norm.weight, norm.bias))
    return total + sum(v.numel() * table_dtype.itemsize for v in vectors if v is not None)
