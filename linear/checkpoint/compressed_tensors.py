"""compressed-tensors: `config_groups`, read by the package's own classes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from ...core.block_shape import BlockShape
from ...core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
    NVFP4,
    Granularity,
    QuantKey,
)
from ...core.scheme import (
    MX_WEIGHT,
    NVFP4_WEIGHT,
    PER_CHANNEL,
    PER_TENSOR,
    LinearScheme,
    WeightScheme,
)
from . import matching
from .document import Document, is_off, short
from .fp8 import block_scheme
from .policy import Group, Policy, Rule, StoredNames, Unserved

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

METHOD = "compressed-tensors"

_NVFP4_NAMES = StoredNames(
    codes=("weight_packed",),
    global_scale=("weight_global_scale",),
    input_scale=("input_global_scale",),
    divisor=True,
)
_READ = frozenset(
    {
        "config_groups",
        "format",
        "ignore",
        "kv_cache_scheme",
        "quant_method",
        "quantization_status",
        "global_compression_ratio",
    }
)
# What changes nothing in what the tensors mean.
_HARMLESS = frozenset({"version", "moe_sparsity_config", "run_compressed", "dequantize"})
_OWN = frozenset({"sparsity_config", "transform_config"})
# Of the others the tensors are packed in another way.
_FORMATS = frozenset(
    {
        "dense",
        "fakequant",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    }
)


def parse(document: Document) -> Policy:
    """The policy of a `quantization_config` of compressed-tensors.

    Raises:
        CheckpointError: a field of the wrong type or value, or an unknown one.
    """
    document.refuse_unknown(_READ | _HARMLESS | _OWN)
    document.names("ignore")
    unserved = _unserved(document)
    _check_blocks(document)
    config = _validated(document)
    notes = []
    if config.kv_cache_scheme is not None:
        notes.append("kv_cache_scheme is not used: the KV cache keeps the model's dtype")
    targets: dict[str, Group] = {}
    for name, scheme in config.config_groups.items():
        assert not isinstance(scheme, list), "the package resolves presets"
        group = _group(name, scheme, config.format, unserved)
        for target in scheme.targets:
            earlier = targets.setdefault(target, group)
            if (earlier.scheme, earlier.stored) != (group.scheme, group.stored):
                reason = f"and {group.where} both target {target!r}, with different schemes"
                raise document.error(earlier.where, reason)
    return Policy(
        METHOD,
        document.source,
        tuple(Rule(target, targets[target]) for target in sorted(targets, key=_precedence)),
        None if config.ignore is None else tuple(config.ignore),
        "ignore",
        matching.compressed_tensors,
        notes=tuple(notes),
    )


def _check_blocks(document: Document) -> None:
    """Before the package reads them: it would take true for 1."""
    groups = document.fields.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        value = weights.get("block_structure") if isinstance(weights, dict) else None
        # "128x128" is the package's own older way to write it.
        if not isinstance(value, str):
            BlockShape.parse(
                value, document.source, f"config_groups.{name}.weights.block_structure"
            )


def _unserved(document: Document) -> Unserved | None:
    if not is_off(document.fields.get("transform_config")):
        return Unserved("transform_config, rotated weights and activations")
    sparse = document.table("sparsity_config")
    packed = None if sparse is None else sparse.text("format")
    if packed not in (None, "dense"):
        return Unserved(f"sparsity_config {packed!r}, sparse weights")
    return None


def _validated(document: Document) -> Any:
    # The package brings transformers along, which takes seconds.
    from compressed_tensors.quantization import QuantizationConfig

    fields = {key: document.fields[key] for key in _READ if key in document.fields}
    fields.setdefault("config_groups", {})
    defaulted = {key for key in ("format", "quantization_status") if fields.get(key, 0) is None}
    try:
        return QuantizationConfig.model_validate(
            {key: value for key, value in fields.items() if key not in defaulted}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # Behind a group's name, pydantic tells which member of a union it tried.
        place = ".".join(str(part) for part in (*first["loc"][:2], *first["loc"][3:]))
        reason = f"is not what compressed-tensors takes: {first['msg']}"
        if first["type"] != "missing":
            reason += f", got {short(first['input'])}"
        raise document.error(place or "config_groups", reason) from error
    except (KeyError, NotImplementedError, TypeError) as error:
        # Its validators let these through: presets and combinations it does not know.
        reason = f"holds what compressed-tensors does not take: {error}"
        raise document.error("config_groups", reason) from error


def _precedence(target: str) -> tuple[int, str]:
    # `match_targets` of the package: names before patterns before classes, each in sorted order.
    return (2 if target == "Linear" else 1 if target.startswith("re:") else 0), target


def _group(
    name: str, scheme: QuantizationScheme, stored_as: str, unserved: Unserved | None
) -> Group:
    where = f"config_groups.{name}"
    if unserved is not None:
        return Group(where, unserved)
    if scheme.weights is None and scheme.input_activations is None:
        return Group(where, None)
    result = _linear_scheme(scheme, str(scheme.format or stored_as))
    nvfp4 = isinstance(result, LinearScheme) and result.weight.global_scale
    return Group(where, result, _NVFP4_NAMES if nvfp4 else StoredNames())


def _linear_scheme(scheme: QuantizationScheme, stored_as: str) -> LinearScheme | Unserved:
    if stored_as not in _FORMATS:
        return Unserved(f"format {stored_as!r}")
    if scheme.output_activations is not None:
        return Unserved("output_activations, quantised outputs")
    if scheme.weights is None:
        return Unserved("input_activations without weights")
    weight = _weight(scheme.weights, stored_as)
    if isinstance(weight, Unserved) or scheme.input_activations is None:
        return weight if isinstance(weight, Unserved) else LinearScheme(weight, None)
    key = _key(scheme.input_activations, weight)
    return key if isinstance(key, Unserved) else LinearScheme(weight, key)


def _weight(args: QuantizationArgs, stored_as: str) -> WeightScheme | Unserved:
    refusal = _refusal("weights", args)
    if refusal is not None:
        return refusal
    if args.dynamic:
        return Unserved("weights with dynamic scales")
    if args.num_bits == 4:
        if args.strategy == "tensor_group" and args.group_size == 16:
            return NVFP4_WEIGHT
        return Unserved(f"four-bit floats with strategy {args.strategy}, size {args.group_size}")
    if args.strategy == "tensor":
        return PER_TENSOR
    if args.strategy == "channel":
        return PER_CHANNEL
    if args.strategy == "block" and args.block_structure is not None:
        return block_scheme(BlockShape(*args.block_structure), ue8m0=False)
    if args.strategy == "group" and args.group_size is not None:
        if stored_as == "mxfp8-quantized" or args.scale_dtype == torch.uint8:
            return MX_WEIGHT if args.group_size == 32 else Unserved("MX scales of other than 32")
        return WeightScheme(1, args.group_size)
    return Unserved(f"FP8 weights with strategy {args.strategy}")


def _key(args: QuantizationArgs, weight: WeightScheme) -> QuantKey | Unserved:
    refusal = _refusal("input_activations", args)
    if refusal is not None:
        return refusal
    if args.num_bits == 4:
        nvfp4 = args.strategy == "tensor_group" and args.group_size == 16 and weight.global_scale
        return NVFP4 if nvfp4 else Unserved(f"four-bit inputs with strategy {args.strategy}")
    if weight.global_scale:
        return Unserved("four-bit weights with eight-bit inputs")
    if args.strategy == "tensor":
        return Unserved("dynamic per-tensor inputs") if args.dynamic else FP8_STATIC_TENSOR
    if not args.dynamic:
        return Unserved(f"static inputs with strategy {args.strategy}")
    if args.strategy == "token":
        return FP8_DYNAMIC_TOKEN
    if args.strategy == "group" and args.group_size is not None:
        if weight == MX_WEIGHT:
            return MXFP8 if args.group_size == 32 else Unserved("MX inputs of other than 32")
        return replace(FP8_DYNAMIC_GROUP128, granularity=Granularity("group", args.group_size))
    return Unserved(f"FP8 inputs with strategy {args.strategy}")


def _refusal(what: str, args: QuantizationArgs) -> Unserved | None:
    if args.type != "float" or args.num_bits not in (4, 8):
        return Unserved(f"{what} in {args.type}{args.num_bits}")
    if not args.symmetric:
        return Unserved(f"asymmetric {what}")
    return None
