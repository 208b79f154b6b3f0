"""Quark's FP8 exports: one configuration for all linears, and others for some."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR, QuantKey
from ...core.scheme import PER_CHANNEL, PER_TENSOR, LinearScheme, WeightScheme
from . import matching
from .document import Document, is_off, short
from .policy import Group, Policy, Rule, Unserved

METHOD = "quark"

_KNOWN = frozenset(
    {
        "algo_config",
        "exclude",
        "export",
        "global_quant_config",
        "kv_cache_post_rope",
        "kv_cache_quant_config",
        "layer_quant_config",
        "layer_type_quant_config",
        "quant_method",
        "quant_mode",
        "version",
    }
)
_CONFIG = frozenset({"bias", "input_tensors", "output_tensors", "target_device", "weight"})
_LINEAR_TYPES = ("Linear", "nn.Linear", "<class 'torch.nn.modules.linear.Linear'>")


def parse(document: Document) -> Policy:
    """The policy of a document with `quant_method` "quark".

    Raises:
        CheckpointError: a field of the wrong type or value, an unknown one, or no
            `global_quant_config`.
    """
    document.refuse_unknown(_KNOWN)
    export = document.table("export")
    cache = frozenset((export and export.names("kv_cache_group")) or ())
    rules = [*_layer_rules(document, cache), _global_rule(document)]
    if _rotates(document):
        unserved = Unserved("algo_config with a rotation, rotated activations")
        rules = [Rule(rule.target, Group("algo_config", unserved)) for rule in rules]
    notes = ()
    if cache or not is_off(document.fields.get("kv_cache_quant_config")):
        notes = ("the KV cache's scheme is not used: the cache keeps the model's dtype",)
    ignore = document.names("exclude")
    return Policy(
        METHOD, document.source, tuple(rules), ignore, "exclude", matching.quark, notes=notes
    )


def _global_rule(document: Document) -> Rule:
    config = document.table("global_quant_config")
    if config is None:
        raise document.error("global_quant_config", "is absent")
    return Rule(None, _group(config, "global_quant_config", False))


def _layer_rules(document: Document, cache: frozenset[str]) -> Iterator[Rule]:
    for pattern, config in document.tables("layer_quant_config").items():
        yield Rule(pattern, _group(config, f"layer_quant_config.{pattern}", pattern in cache))
    for kind, config in document.tables("layer_type_quant_config").items():
        if kind in _LINEAR_TYPES:
            yield Rule(None, _group(config, f"layer_type_quant_config.{kind}", False))


def _rotates(document: Document) -> bool:
    value = document.fields.get("algo_config")
    if is_off(value):
        return False
    algorithms = value if isinstance(value, list) else [value]
    names = []
    for algorithm in algorithms:
        if not isinstance(algorithm, dict):
            raise document.wrong("algo_config", "an object or a list of objects")
        names.append(str(algorithm.get("name", "")).lower())
    return any("rot" in name for name in names)


def _group(config: Document, where: str, caches: bool) -> Group:
    config.refuse_unknown(_CONFIG)
    # The outputs of the projections into the KV cache are the cache.
    if not caches and not is_off(config.fields.get("output_tensors")):
        return Group(where, Unserved("output_tensors, quantised outputs"))
    if not is_off(config.fields.get("bias")):
        return Group(where, Unserved("a quantised bias"))
    for field in ("weight", "input_tensors"):
        if isinstance(config.fields.get(field), list):
            return Group(where, Unserved(f"{field} in two stages"))
    weight, inputs = config.table("weight"), config.table("input_tensors")
    if weight is None:
        what = None if inputs is None else Unserved("input_tensors without weight")
        return Group(where, what)
    scheme = _weight(weight)
    if isinstance(scheme, Unserved):
        return Group(where, scheme)
    key = None if inputs is None else _key(inputs)
    return Group(where, key if isinstance(key, Unserved) else LinearScheme(scheme, key))


def _codes(spec: Document) -> Unserved | None:
    codes = spec.text("dtype")
    if codes != "fp8_e4m3":
        return Unserved(f"{spec.source.rpartition('.')[2]} in {codes}")
    return None


def _weight(spec: Document) -> WeightScheme | Unserved:
    refusal = _codes(spec)
    if refusal is not None:
        return refusal
    if spec.flag("is_dynamic"):
        return Unserved("weights with dynamic scales")
    found, axis = spec.text("qscheme"), spec.fields.get("ch_axis")
    if found == "per_tensor":
        return PER_TENSOR
    if found == "per_channel" and axis == 0:
        return PER_CHANNEL
    return Unserved(f"weights with qscheme {found}, ch_axis {short(axis)}")


def _key(spec: Document) -> QuantKey | Unserved:
    refusal = _codes(spec)
    if refusal is not None:
        return refusal
    found, axis, dynamic = spec.text("qscheme"), spec.fields.get("ch_axis"), spec.flag("is_dynamic")
    if found == "per_tensor" and not dynamic:
        return FP8_STATIC_TENSOR
    # The channels of an activation (rows, K) along axis 1 of its rows are its tokens.
    if found == "per_channel" and dynamic and axis in (1, -1):
        return FP8_DYNAMIC_TOKEN
    mode = "dynamic" if dynamic else "static"
    return Unserved(f"{mode} inputs with qscheme {found}, ch_axis {short(axis)}")
