"""What a quantised checkpoint is, in words and numbers, from its metadata and headers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...core.errors import CheckpointError, ScaleError
from ...core.report import ReportPart
from .layer import KV_CACHE_SCALES, Layer, TensorHeader, wide
from .metadata import CheckpointQuant
from .resolve import ResolvedQuant

_OTHER_MODEL = "use the checkpoint of this model"


class SchemeSummary(ReportPart):
    """The linears of one scheme.

    Attributes:
        scheme: weight and input, as `LinearScheme` writes them.
        linears: full names in the checkpoint.
        nbytes: of their codes and scales.
    """

    scheme: str
    linears: tuple[str, ...]
    nbytes: int


class QuantSummary(ReportPart):
    """What a checkpoint says of its quantisation, and what that makes of the model's linears.

    Attributes:
        method: the family of formats.
        source: file and place of the metadata.
        says: the schemes that the metadata names, whatever the tensors say.
        schemes: those of the model's linears, in the model's order; empty where the checkpoint
            contradicts itself, or is unquantised in spite of its metadata.
        unquantized: full names of the other linears.
        unmatched: entries of the ignore list that name no linear.
        decisions: which value was taken from where, notes on the KV cache included.
        kv_cache_scales: how many tensors are scales of the KV cache, which is not used.
    """

    method: str
    source: str
    says: tuple[str, ...]
    schemes: tuple[SchemeSummary, ...] = ()
    unquantized: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    kv_cache_scales: int = 0


def describe_quant(
    metadata: CheckpointQuant,
    headers: Mapping[str, TensorHeader],
    resolved: ResolvedQuant | None,
) -> QuantSummary:
    """Sum up a checkpoint.

    Args:
        metadata: what it says of itself.
        headers: dtype and shape of all of its tensors, by full name.
        resolved: what each linear is by both; None where they contradict each other.
    """
    said = QuantSummary(
        method=metadata.method,
        source=metadata.source,
        says=metadata.policy.schemes(),
        decisions=metadata.policy.notes,
        kv_cache_scales=sum(name.rpartition(".")[2] in KV_CACHE_SCALES for name in headers),
    )
    if resolved is None:
        return said
    return said.model_copy(
        update={
            "schemes": _schemes(resolved, headers),
            "unquantized": resolved.unquantized,
            "unmatched": resolved.unmatched,
            "decisions": resolved.decisions,
        }
    )


def _schemes(
    resolved: ResolvedQuant, headers: Mapping[str, TensorHeader]
) -> tuple[SchemeSummary, ...]:
    linears: dict[str, list[str]] = {}
    for name, scheme in resolved.schemes.items():
        linears.setdefault(str(scheme), []).append(name)
    return tuple(
        SchemeSummary(
            scheme=scheme,
            linears=tuple(names),
            nbytes=sum(
                tensor_nbytes(headers[full])
                for name in names
                for full in resolved.tensor_names(name)
            ),
        )
        for scheme, names in linears.items()
    )


def check_shapes(
    resolved: ResolvedQuant,
    headers: Mapping[str, TensorHeader],
    shapes: Mapping[str, tuple[int, int]],
) -> None:
    """Compare the quantised linears' tensors with the model's linears, as loading does.

    Args:
        resolved: by the same headers.
        headers: dtype and shape of every tensor, by full name.
        shapes: (N, K) of linears, by their full names in the checkpoint; others are not compared.

    Raises:
        CheckpointError: codes of another shape than the model's weight.
        ScaleError: weight scales of another shape than the scheme's.
    """
    for name, layer in resolved.layers.items():
        if name in shapes:
            _check_layer(layer, headers, shapes[name])


def _check_layer(layer: Layer, headers: Mapping[str, TensorHeader], shape: tuple[int, int]) -> None:
    weight, (rows, columns) = layer.scheme.weight, shape
    codes = headers[f"{layer.name}.{layer.stored.codes[0]}"].shape
    wanted = (rows, -(-columns // 2)) if weight.global_scale else shape
    if codes != wanted:
        reason = f"its weight has shape {codes}, the model's takes {wanted}"
        raise CheckpointError(layer.name, reason, _OTHER_MODEL)
    scale = headers[f"{layer.name}.{layer.stored.scale[0]}"].shape
    scales = weight.scale_shape(*shape)
    if wide(scale) != wide(scales):
        reason = f"its weight scale has shape {scale}, {weight} of a weight {shape} takes {scales}"
        raise ScaleError(layer.name, reason, _OTHER_MODEL)


def tensor_nbytes(header: TensorHeader) -> int:
    """The size of a tensor's elements."""
    return math.prod(header.shape) * header.dtype.itemsize
