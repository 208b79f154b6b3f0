"""`quant_method: fp8` (fine-grained and AutoFP8 style), its MX variant, and `fbgemm_fp8`."""

from __future__ import annotations

from dataclasses import replace

from ...core.block_shape import BlockShape
from ...core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_DYNAMIC_TOKEN_UE8M0,
    FP8_STATIC_TENSOR,
    MXFP8,
    Granularity,
    QuantKey,
    ScaleFormat,
)
from ...core.scheme import MX_WEIGHT, PER_CHANNEL, PER_TENSOR, LinearScheme, WeightScheme
from . import matching
from .document import Document, is_off, short
from .policy import Group, Open, Policy, Rule, StoredNames, Unserved

METHOD = "fp8"
FBGEMM = "fbgemm_fp8"

#: FBGEMM's own bound of an input row's magnitude.
FBGEMM_BOUND = 1200.0
DEFAULT_BLOCK = BlockShape(128, 128)
_MX_BLOCK = BlockShape(1, 32)

_NAMES = StoredNames(
    scale=("weight_scale_inv", "weight_scale", "scale", "qscale_weight"),
    input_scale=("input_scale", "activation_scale", "qscale_act"),
)
_LISTS = ("modules_to_not_convert", "ignored_layers")
_READ = frozenset(
    {
        *_LISTS,
        "activation_scheme",
        "expert_dtype",
        "fmt",
        "modules_to_convert",
        "quant_method",
        "scale_fmt",
        "weight_block_size",
    }
)
_NOTED = {
    "dequantize": "dequantize is a wish to another loader: the codes stay as they are",
    "kv_cache_quant_targets": "kv_cache_quant_targets are not used",
    "kv_cache_scheme": "kv_cache_scheme is not used: the KV cache keeps the model's dtype",
}
_E4M3 = (None, "e4m3", "e4m3fn", "float8_e4m3fn")


def parse(document: Document) -> Policy:
    """The policy of a document with `quant_method` "fp8" or "mxfp8".

    Raises:
        CheckpointError: a field of the wrong type or value, or an unknown one.
    """
    document.refuse_unknown(_READ | _NOTED.keys())
    field, ignore = _ignore(document)
    group = _group(document)
    notes = [text for key, text in _NOTED.items() if not is_off(document.fields.get(key))]
    if isinstance(group.scheme, LinearScheme) and group.scheme.input == FP8_DYNAMIC_TOKEN:
        notes.append("dynamic inputs of weights without blocks take one scale a token")
    return Policy(
        METHOD,
        document.source,
        (Rule(None, group),),
        ignore,
        field,
        matching.transformers,
        silent_ignore=True,
        covers_below=True,
        notes=tuple(notes),
    )


def parse_fbgemm(document: Document) -> Policy:
    """The policy of a document with `quant_method` "fbgemm_fp8".

    Raises:
        CheckpointError: a field of the wrong type or value, or an unknown one.
    """
    document.refuse_unknown(frozenset({*_LISTS, "activation_scale_ub", "quant_method"}))
    bound = document.positive("activation_scale_ub") or FBGEMM_BOUND
    scheme: LinearScheme | Unserved = LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN)
    if bound < FBGEMM_BOUND:
        scheme = Unserved(
            f"activation_scale_ub {bound:g}, which clips inputs",
            f"serve a checkpoint with FBGEMM's own bound, {FBGEMM_BOUND:g}, or above",
        )
    field, ignore = _ignore(document)
    return Policy(
        FBGEMM,
        document.source,
        (Rule(None, Group("quant_method", scheme)),),
        ignore,
        field,
        matching.transformers,
        silent_ignore=True,
        covers_below=True,
        notes=(
            f"activation_scale_ub {bound:g} is not applied: FBGEMM clips inputs there, "
            "here a row's scale covers its largest magnitude",
        ),
    )


def input_key(weight: WeightScheme, static: bool) -> QuantKey:
    """The key that the format's readers give inputs of such weights."""
    if static:
        return FP8_STATIC_TENSOR
    if weight == MX_WEIGHT:
        return MXFP8
    if not weight.blockwise:
        ue8m0 = weight.scale_format == ScaleFormat.UE8M0
        return FP8_DYNAMIC_TOKEN_UE8M0 if ue8m0 else FP8_DYNAMIC_TOKEN
    return replace(
        FP8_DYNAMIC_GROUP128,
        scale_format=weight.scale_format,
        granularity=Granularity("group", weight.columns),
    )


def block_scheme(block: BlockShape, *, ue8m0: bool) -> WeightScheme:
    """The scheme of weights in blocks."""
    scale_format = ScaleFormat.UE8M0 if ue8m0 else ScaleFormat.FLOAT32
    return WeightScheme(block.rows, block.columns, scale_format=scale_format)


def _ignore(document: Document) -> tuple[str, tuple[str, ...] | None]:
    given = [(field, names) for field in _LISTS if (names := document.names(field)) is not None]
    if len({frozenset(names) for _, names in given}) > 1:
        raise document.error(_LISTS[0], f"and {_LISTS[1]} are two different lists")
    return given[0] if given else (_LISTS[0], None)


def _group(document: Document) -> Group:
    refusal = _refusal(document)
    scale_format, mx = _scale_format(document)
    block = _block(document, _MX_BLOCK if mx else DEFAULT_BLOCK)
    static = _static(document)
    if refusal is not None:
        return Group("quant_method", refusal)
    ue8m0 = scale_format == "ue8m0"
    weight = PER_TENSOR if block is None else block_scheme(block, ue8m0=ue8m0)
    scheme = LinearScheme(weight, input_key(weight, bool(static)))
    return Group("quant_method", scheme, _NAMES, frozenset() if mx else _open(document))


def _open(document: Document) -> frozenset[Open]:
    found: set[Open] = set()
    # A block size of null is a statement, the other two say nothing with it.
    if "weight_block_size" not in document.fields:
        found.add("blocks")
    if document.fields.get("activation_scheme") is None:
        found.add("inputs")
    if document.fields.get("scale_fmt") is None:
        found.add("scale format")
    return frozenset(found)


def _refusal(document: Document) -> Unserved | None:
    codes = document.text("fmt")
    if codes not in _E4M3:
        return Unserved(f"codes in {codes}", "convert the weights to float8_e4m3fn")
    if document.text("expert_dtype") not in (None, "fp8"):
        return Unserved(f"expert_dtype {document.text('expert_dtype')}")
    converted = document.names("modules_to_convert")
    if converted:
        return Unserved(f"modules_to_convert {short(converted[0])}, quantised embeddings")
    return None


def _scale_format(document: Document) -> tuple[str, bool]:
    mx = (document.text("quant_method") or "").lower() == "mxfp8"
    found = document.text("scale_fmt") or ("ue8m0" if mx else "float")
    if found not in ("float", "float32", "ue8m0"):
        raise document.wrong("scale_fmt", "'float' or 'ue8m0'")
    if mx and found != "ue8m0":
        raise document.error("scale_fmt", f"is {found!r}, but quant_method is 'mxfp8'")
    return found, mx


def _block(document: Document, default: BlockShape) -> BlockShape | None:
    key = "weight_block_size"
    if key not in document.fields:
        return default
    return BlockShape.parse(document.fields[key], document.source, key)


def _static(document: Document) -> bool | None:
    found = document.text("activation_scheme")
    if found is not None and found.lower() not in ("static", "dynamic"):
        raise document.wrong("activation_scheme", "'static' or 'dynamic'")
    return None if found is None else found.lower() == "static"
