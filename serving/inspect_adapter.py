"""What an adapter would be on a model: whether it fits, and what it costs; nothing is served."""

from __future__ import annotations

from pathlib import Path

import torch

from ..adapters.assemble import base_need, base_use
from ..adapters.base import BaseFacts
from ..adapters.branch import LayerBranch, check_range
from ..adapters.contents import ModuleContent, contents_of, planned_contents
from ..adapters.embedding import EmbeddingBranch
from ..adapters.experts import ExpertsBranch
from ..adapters.read import read_adapter, read_plan
from ..adapters.slots import SlotClasses
from ..adapters.weights import AdapterWeights
from ..core.errors import AdapterError
from ..linear.weights import kind_refusal
from .config import WrapConfig
from .inspect_report import FitReport
from .skeleton import Skeleton


def try_on(adapter: Path, label: str, folder: Path, config: WrapConfig) -> FitReport:
    """Load the adapter as a served model would, and nothing else.

    What is known once the model runs (linears that mix the batch's rows take no adapter) is not
    checked.

    Args:
        adapter: its folder.
        label: what messages call it.
        folder: of the model.
        config: how the model would be wrapped.

    Raises:
        WrapError: transformers cannot read the model.
    """
    skeleton = Skeleton.of(folder)
    facts = _facts(skeleton, config)
    max_rank = config.tier_limits.width
    report = FitReport(
        folder=str(folder),
        architecture=type(skeleton.model).__name__,
        linears_of_model=len(facts.layers),
        modules=(),
        raw=(),
        digest=None,
        max_lora_rank=max_rank,
        slot_nbytes=None,
        notes=(),
        problem=None,
    )
    try:
        plan = read_plan(adapter, facts, max_rank=max_rank)
        if (need := base_need(plan)) is not None:
            note = f"{need} is computed with the base's weights: size and digest are told by a load"
            told = _told(planned_contents(plan), (*plan.notes, note))
            return report.model_copy(update=told)
        weights = read_adapter(adapter, facts, max_rank=max_rank)
        dtype = None if skeleton.dtype is None else config.lora_dtype.resolve(skeleton.dtype)
        if dtype is not None:
            check_range(label, weights, dtype)
    except AdapterError as error:
        problem = type(error)(f"adapter {label!r}", error.reason, error.remedy)
        return report.model_copy(update={"problem": str(problem)})
    told = _told(contents_of(weights, facts.targets), weights.notes)
    if (use := base_use(plan)) is not None:
        note = f"{use} is compared with the base's own: size and digest are told by a load"
        return report.model_copy(update=told | {"notes": (*weights.notes, note)})
    told["digest"] = weights.digest
    if dtype is not None:
        told["slot_nbytes"] = _slot_nbytes(facts, weights, max_rank, dtype, skeleton.dtype)
    return report.model_copy(update=told)


def _facts(skeleton: Skeleton, config: WrapConfig) -> BaseFacts:
    refusals = {
        name: reason
        for name in skeleton.facts.layers
        if (reason := kind_refusal(skeleton.model.get_submodule(name))) is not None
    }
    facts = skeleton.facts.with_refusals(refusals)
    return facts.with_base_rules(
        allow_mismatch=config.allow_base_mismatch, reads_folders=config.allowed_roots is None
    )


def _told(modules: tuple[ModuleContent, ...], notes: tuple[str, ...]) -> dict[str, object]:
    raw = tuple(module.name for module in modules if module.reads_raw)
    return {"modules": modules, "raw": raw, "notes": notes}


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
    for name, own in weights.experts.items():
        target = facts.experts[name]
        sizes = (target.experts, target.in_features, target.out_features)
        experts = ExpertsBranch(name, SlotClasses((max_rank,)), *sizes, dtype, cpu)
        experts.write(0, own)
        total += experts.nbytes
    table_dtype = model_dtype or dtype
    for table in weights.embeddings.values():
        embedding = EmbeddingBranch(1.0, dtype, table_dtype, cpu)
        embedding.write(0, table)
        total += embedding.nbytes
    vectors = (v for norm in weights.norms.values() for v in (norm.weight, norm.bias))
    return total + sum(v.numel() * table_dtype.itemsize for v in vectors if v is not None)
