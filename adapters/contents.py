"""What an adapter holds for each module, as a listing tells it: parts, rank, scaling, raw input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ..core.report import ReportPart
from .base import Target, TargetEmbedding, TargetExperts, TargetLayer
from .check import LoadPlan, PlannedModule
from .config_file import ParsedConfig
from .names import PEFT_PREFIX, NameParser
from .saved import COPY_SUFFIX
from .tensor_file import TensorHeader
from .tuners.base import Module, TunerType
from .weights import (
    AdapterWeights,
    AnyWeights,
    EmbeddingWeights,
    ExpertsWeights,
    LayerWeights,
    LowRank,
    NormWeights,
)

_Kind = Literal["linear", "embedding", "norm", "experts"]
_LINEAR_PARTS: Mapping[str, str] = {
    "low_rank": "low-rank",
    "gain": "gain",
    "shift": "shift",
    "in_scale": "input scale",
    "rotation": "rotation",
    "output_rotation": "output rotation",
    "delta": "delta",
    "weight": "weight",
}


class ModuleContent(ReportPart):
    """What an adapter holds for one module.

    Attributes:
        name: of the module; without a model, as the adapter names it, without PEFT's prefix.
        kind: of module; None where it takes the base model to tell.
        parts: that the module computes with ("low-rank", "gain", "3 tokens"); where it takes the
            base's weights or the base model to tell, those that the file stores ("lora_A").
        rank: of its low-rank product; None where it has none, or none is known yet.
        scaling: that the product is multiplied with; None likewise.
        shape: (N, K) of a linear, (V, D) of an embedding, (K,) of a norm, (E, N, K) of
            experts; None where unknown.
        reads_raw: whether it reads the raw activation; None where it takes the base to tell.
    """

    name: str
    kind: _Kind | None
    parts: tuple[str, ...]
    rank: int | None = None
    scaling: float | None = None
    shape: tuple[int, ...] | None = None
    reads_raw: bool | None = None


def contents_of(
    weights: AdapterWeights, targets: Mapping[str, Target]
) -> tuple[ModuleContent, ...]:
    """What was lowered, module by module.

    Args:
        weights: of the adapter.
        targets: modules of its base model by name, all of the adapter's among them.
    """
    return tuple(
        _content(targets[name], _parts_of(held), _product_of(held), _reads_raw(held))
        for name, held in weights.modules.items()
    )


def planned_contents(plan: LoadPlan) -> tuple[ModuleContent, ...]:
    """What is stored for each module of an adapter that only a base's weights can lower.

    Raw activations are read where the base's weights are changed, which is what such weights are
    needed for.
    """
    found = []
    for planned in plan.modules.values():
        parts = (*_stored_parts(planned), *_saved_parts(planned))
        product = _settings(plan.tuner, plan.config, planned.module)
        reads_raw = isinstance(planned.target, TargetLayer | TargetExperts)
        found.append(_content(planned.target, parts, product, reads_raw))
    return tuple(found)


def stored_contents(
    parsed: ParsedConfig | None, headers: Iterable[TensorHeader], parser: NameParser
) -> tuple[ModuleContent, ...]:
    """What is stored for each module, as far as names and config tell without a base model.

    Args:
        parsed: the config; None where it cannot be read, so that ranks are not known.
        headers: all tensors.
        parser: of the names of the type's own tensors.
    """
    own: dict[str, dict[str, TensorHeader]] = {}
    parts: dict[str, list[str]] = {}
    for header in headers:
        part = parser.parse(header.name)
        if part is None:
            module, stored = _other(header, parsed)
            parts.setdefault(module, []).append(stored)
        elif part.module:
            own.setdefault(part.module, {})[part.part] = header
            parts.setdefault(part.module, []).append(part.part)
    found = []
    for name, stored in parts.items():
        product = (None, None)
        if parsed is not None and name in own:
            module = Module(TargetLayer(name, 0, 0), name, own[name])
            product = _settings(parsed.tuner, parsed.config, module)
        kind = "embedding" if any("embedding" in part for part in stored) else None
        rank, scaling = product
        found.append(
            ModuleContent(name=name, kind=kind, parts=tuple(stored), rank=rank, scaling=scaling)
        )
    return tuple(found)


# --- one module --------------------------------------------------------------------------------

_Product = tuple[int | None, float | None]


def _content(
    target: Target, parts: tuple[str, ...], product: _Product, reads_raw: bool
) -> ModuleContent:
    kind, shape = _kind_and_shape(target)
    rank, scaling = product
    return ModuleContent(
        name=target.name,
        kind=kind,
        parts=parts,
        rank=rank,
        scaling=scaling,
        # A size that nothing hangs on is 0 where the adapter's own tensors told it.
        shape=shape if all(shape) else None,
        reads_raw=reads_raw,
    )


def _kind_and_shape(target: Target) -> tuple[_Kind, tuple[int, ...]]:
    if isinstance(target, TargetLayer):
        return "linear", (target.out_features, target.in_features)
    if isinstance(target, TargetEmbedding):
        return "embedding", (target.num_embeddings, target.embedding_dim)
    if isinstance(target, TargetExperts):
        return "experts", (target.experts, target.out_features, target.in_features)
    return "norm", (target.size,)


def _parts_of(held: AnyWeights) -> tuple[str, ...]:
    if isinstance(held, ExpertsWeights):
        return ("low-rank",)
    if isinstance(held, NormWeights):
        return ("weight",) if held.bias is None else ("weight", "bias")
    if isinstance(held, EmbeddingWeights):
        tokens = () if held.tokens is None else (_tokens(len(held.tokens)),)
        low_rank = () if held.low_rank is None else ("low-rank",)
        return (*low_rank, *tokens, *(() if held.weight is None else ("weight",)))
    present = (name for name in _LINEAR_PARTS if _is_there(getattr(held, name)))
    return tuple(_LINEAR_PARTS[name] for name in present)


def _is_there(part: object) -> bool:
    return part is not None and part != ()


def _product_of(held: AnyWeights) -> _Product:
    product: LowRank | ExpertsWeights | None = (
        held if isinstance(held, ExpertsWeights) else getattr(held, "low_rank", None)
    )
    return (None, None) if product is None else (product.rank, product.scaling)


def _reads_raw(held: AnyWeights) -> bool:
    return isinstance(held, LayerWeights | ExpertsWeights) and held.reads_raw


def _settings(tuner: TunerType[Any], config: Any, module: Module) -> _Product:
    """Rank and scaling of a module's own product; none where the type has none for certain."""
    rank = tuner.rank(config, module) if module.headers else 0
    if not rank:
        return None, None
    return rank, getattr(tuner.settings(config, module), "scaling", None)


def _stored_parts(planned: PlannedModule) -> tuple[str, ...]:
    return tuple(planned.module.headers)


def _saved_parts(planned: PlannedModule) -> tuple[str, ...]:
    tokens = () if planned.tokens is None else (_tokens(len(planned.tokens.ids)),)
    return (*planned.whole, *(_copy(part) for part in planned.copies), *tokens)


def _other(header: TensorHeader, parsed: ParsedConfig | None) -> tuple[str, str]:
    """The module of a tensor that is none of the type's own, and what it is."""
    name = header.name.removeprefix(PEFT_PREFIX)
    token_end = "" if parsed is None else f".{parsed.tuner.token_end}"
    if token_end and name.endswith(token_end):
        return name.removesuffix(token_end), _tokens(header.shape[0] if header.shape else 0)
    module, _, end = name.rpartition(".")
    if module.endswith(COPY_SUFFIX):
        return module.removesuffix(COPY_SUFFIX), _copy(end)
    return module, end


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _copy(part: str) -> str:
    return f"copy of the base's {part}"
