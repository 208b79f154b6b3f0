"""ModelOpt: `hf_quant_config.json`, and the same in config.json under other keys."""

from __future__ import annotations

from ...core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR, MXFP8, NVFP4
from ...core.scheme import (
    BLOCK_128,
    MX_WEIGHT,
    NVFP4_WEIGHT,
    PER_CHANNEL,
    PER_TENSOR,
    LinearScheme,
)
from . import matching
from .document import Document
from .policy import Group, Policy, Rule, StoredNames, Unserved

METHOD = "modelopt"

#: What each `quant_algo` means. The weights of `FP8_PB_WO` are in blocks, its inputs unquantised.
ALGORITHMS = {
    "FP8": LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
    "FP8_PB_WO": LinearScheme(BLOCK_128, None),
    "MXFP8": LinearScheme(MX_WEIGHT, MXFP8),
    "NVFP4": LinearScheme(NVFP4_WEIGHT, NVFP4),
    "W4A16_NVFP4": LinearScheme(NVFP4_WEIGHT, None),
}
_NVFP4_NAMES = StoredNames(global_scale=("weight_scale_2",))
_KNOWN = frozenset(
    {
        "config_groups",
        "exclude_modules",
        "group_size",
        "has_zero_point",
        "ignore",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "pre_quant_scale",
        "producer",
        "quant_algo",
        "quant_method",
        "quantized_layers",
    }
)


def parse(document: Document) -> Policy:
    """The policy of a ModelOpt document.

    Raises:
        CheckpointError: a field of the wrong type or value, an unknown one, no `quant_algo`, or
            fields that contradict each other.
    """
    inner = document.table("quantization")
    if inner is not None:
        document.refuse_unknown(frozenset({"producer", "quantization", "quant_method"}))
        document = inner
    document.refuse_unknown(_KNOWN)
    algorithm = document.text("quant_algo")
    if "quant_algo" not in document.fields:
        raise document.error("quant_algo", "is absent")
    field, ignore = _ignore(document)
    return Policy(
        METHOD,
        document.source,
        _rules(document, (algorithm or "").upper()),
        ignore,
        field,
        matching.modelopt,
        notes=_notes(document),
    )


def _ignore(document: Document) -> tuple[str, tuple[str, ...] | None]:
    lists = {field: document.names(field) for field in ("exclude_modules", "ignore")}
    given = {field: names for field, names in lists.items() if names is not None}
    if len({frozenset(names) for names in given.values()}) > 1:
        raise document.error("exclude_modules", "and ignore are two different lists")
    return next(iter(given.items()), ("exclude_modules", None))


def _notes(document: Document) -> tuple[str, ...]:
    algorithm = document.text("kv_cache_quant_algo")
    if algorithm is not None:
        what = f"kv_cache_quant_algo {algorithm}"
    elif document.table("kv_cache_scheme") is not None:
        what = "kv_cache_scheme"
    else:
        return ()
    return (f"{what} is not used: the KV cache keeps the model's dtype",)


def _rules(document: Document, algorithm: str) -> tuple[Rule, ...]:
    layers = document.tables("quantized_layers")
    if algorithm == "MIXED_PRECISION":
        if not layers:
            raise document.error("quantized_layers", "is absent or empty: MIXED_PRECISION needs it")
        return tuple(Rule(name, _layer_group(layer)) for name, layer in layers.items())
    if layers:
        reason = f"is there, but quant_algo is {algorithm or None}, not MIXED_PRECISION"
        raise document.error("quantized_layers", reason)
    if not algorithm:
        return ()
    _check_config_groups(document, algorithm)
    return (Rule(None, _group(document, "quant_algo", algorithm)),)


def _layer_group(layer: Document) -> Group:
    algorithm = (layer.text("quant_algo") or "").upper()
    where = layer.source.rpartition(": ")[2]
    return _group(layer, where, algorithm) if algorithm else Group(where, None)


def _group(document: Document, where: str, algorithm: str) -> Group:
    scheme = ALGORITHMS.get(algorithm)
    if scheme is None:
        return Group(where, Unserved(f"quant_algo {algorithm}"))
    if document.flag("pre_quant_scale"):
        return Group(where, Unserved("pre_quant_scale, inputs that are scaled first"))
    if document.flag("has_zero_point"):
        return Group(where, Unserved("has_zero_point, asymmetric weights"))
    size = document.positive("group_size")
    if size is not None and scheme.weight.rows == 1 and scheme.weight.columns not in (0, size):
        return Group(where, Unserved(f"{algorithm} with group_size {size:g}"))
    return Group(where, scheme, _NVFP4_NAMES if scheme.weight.global_scale else StoredNames())


def _check_config_groups(document: Document, algorithm: str) -> None:
    scheme = ALGORITHMS.get(algorithm)
    if scheme is None:
        return
    expected = 4 if scheme.weight.global_scale else 8
    for name, group in document.tables("config_groups").items():
        weights = group.table("weights")
        bits = None if weights is None else weights.positive("num_bits")
        if bits is not None and bits != expected:
            reason = f"has weights.num_bits {bits:g}, but quant_algo is {algorithm}"
            raise document.error(f"config_groups.{name}", reason)
        inputs = group.table("input_activations")
        if inputs is not None and scheme.static and inputs.flag("dynamic"):
            reason = f"has dynamic inputs, but quant_algo {algorithm} is static"
            raise document.error(f"config_groups.{name}", reason)
