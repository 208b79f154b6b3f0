"""What a model's folder is, and what contradicts it; no weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from ..core.errors import CheckpointError, ScaleError
from ..linear.checkpoint import CheckpointQuant, ResolvedQuant, TensorHeader, read_metadata
from ..linear.checkpoint.describe import QuantSummary, check_shapes, describe_quant
from ..linear.weights import LinearModule, kind_refusal, linear_shape
from .checkpoint_names import checkpoint_names
from .inspect_report import LinearSummary, ModelReport
from .load import refuse_codes
from .quantized_loader import refuse_leftovers, refuse_tied, stored_linears
from .shards import read_headers, shard_files
from .skeleton import Skeleton

#: What speaks against a checkpoint that could be read.
_FINDINGS = (CheckpointError, ScaleError)


def inspect_model(folder: Path) -> ModelReport:
    """Tell how a model's folder is quantised, or what could be.

    Raises:
        WrapError: transformers cannot read it.
        CheckpointError: files of weights that are missing or damaged.
    """
    skeleton = Skeleton.of(folder)
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
    skeleton: Skeleton, headers: Mapping[str, TensorHeader]
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


def _linears(skeleton: Skeleton) -> tuple[LinearSummary, ...]:
    head = skeleton.facts.output_embedding
    found = []
    for name, layer in skeleton.facts.layers.items():
        left = kind_refusal(skeleton.model.get_submodule(name))
        if left is None and name == head:
            left = "it is the output head"
        shape = (layer.out_features, layer.in_features)
        found.append(LinearSummary(name=name, shape=shape, left=left))
    return tuple(found)
