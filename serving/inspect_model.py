"""What a model's folder is, and what contradicts it; no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PreTrainedModel

from ..core.errors import CheckpointError, ScaleError
from ..linear.checkpoint import TensorHeader, read_metadata
from ..linear.checkpoint.describe import QuantSummary, describe_quant
from ..linear.experts.find import find_experts
from ..linear.weights import kind_refusal
from .experts_proof import ExpertsProof
from .inspect_report import LinearSummary, ModelReport
from .load import refuse_codes
from .shards import read_headers, shard_files
from .skeleton import Skeleton
from .stored_model import StoredModel

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
        # As loading does it, and its checks, as far as they need no values.
        stored = StoredModel.read(skeleton.model, metadata, headers)
    except _FINDINGS as error:
        said = None if metadata is None else describe_quant(metadata, headers, None)
        return said, str(error)
    return describe_quant(metadata, stored.headers, stored.resolved), None


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
    return (*found, *_experts(skeleton.model))


def _experts(model: PreTrainedModel) -> Iterator[LinearSummary]:
    served, refused = find_experts(model)
    proof = ExpertsProof()
    for name, found in served.items():
        left = proof.difference(name, found.module, found.form) or None
        for projection in (found.form.up_name, found.form.down_name):
            experts, outputs, inputs = found.form.shape(projection)
            full, shape = f"{name}.{projection}", (outputs, inputs)
            yield LinearSummary(name=full, shape=shape, left=left, experts=experts)
    for name, reason in refused.items():
        module = model.get_submodule(name)
        for projection, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3:
                experts, rows, columns = weight.shape
                full, shape = f"{name}.{projection}", (rows, columns)
                yield LinearSummary(name=full, shape=shape, left=reason, experts=experts)
