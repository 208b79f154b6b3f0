"""From the tensors of a checked adapter to the parts that the model computes with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ..core.errors import AdapterUnsupportedError
from ..core.magnitude import magnitudes
from .base import BaseWeights, TargetEmbedding, TargetLayer
from .check import LoadPlan, PlannedModule
from .findings import Finding, damaged, listing, raise_findings
from .tuners.base import Lowering
from .weights import (
    AdapterWeights,
    AnyWeights,
    EmbeddingWeights,
    ExpertsWeights,
    LayerWeights,
    LowRank,
    NormWeights,
    content_digest,
    effect_note,
    part_tensors,
)

Fetch = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


def assemble(
    plan: LoadPlan,
    fetch: Fetch,
    *,
    source: str,
    subject: str,
    base_weights: BaseWeights | None = None,
) -> AdapterWeights:
    """Fetch the tensors of a plan and lower them.

    Args:
        plan: from `read.checked_plan`.
        fetch: gives tensors by their names in the file.
        source: what `AdapterWeights.source` says.
        subject: what errors are about.
        base_weights: of the model, for what cannot be lowered without (DoRA).

    Raises:
        AdapterFormatError: a tensor holds NaN or infinity, or cannot be read.
        AdapterUnsupportedError: it takes the base's weights, and there are none at hand.
        AdapterError: what the headers could not tell speaks against it.
    """
    _require_base(plan, base_weights, subject)
    assembly = _Assembly(plan, fetch, base_weights)
    parts = {name: assembly.lower(planned) for name, planned in plan.modules.items()}
    raise_findings(subject, assembly.findings)
    raise_findings(subject, _lowered_findings(parts, assembly.stored))
    layers = {name: part for name, part in parts.items() if isinstance(part, LayerWeights)}
    tables = {name: part for name, part in parts.items() if isinstance(part, EmbeddingWeights)}
    norms = {name: part for name, part in parts.items() if isinstance(part, NormWeights)}
    experts = {name: part for name, part in parts.items() if isinstance(part, ExpertsWeights)}
    effect = effect_note(layers, experts) if not tables and not norms else None
    notes = (*plan.notes, *assembly.notes, *_dense_notes(plan, layers))
    notes += (effect,) if effect else ()
    invocation = plan.tuner.invocation(plan.config)
    return AdapterWeights(
        source,
        content_digest(layers, tables, norms, experts, invocation=invocation),
        MappingProxyType(layers),
        notes,
        MappingProxyType(tables),
        MappingProxyType(norms),
        plan.tuner.peft_type,
        invocation=invocation,
        uses_base=bool(base_need(plan) or base_use(plan)),
        experts=MappingProxyType(experts),
    )


def _dense_notes(plan: LoadPlan, layers: Mapping[str, LayerWeights]) -> tuple[str, ...]:
    """Say where the slots' rank makes dense what could be a product."""
    ranks = []
    for name, weights in layers.items():
        module = plan.modules[name].module
        if weights.delta is None or not module.headers:
            continue
        rank = plan.tuner.product_rank(plan.config, module)
        if rank > plan.max_rank:
            ranks.append(rank)
    if not ranks:
        return ()
    return (
        f"dense: products of rank {max(ranks)} fit no slot of rank {plan.max_rank}, so "
        f"{len(ranks)} linears multiply with a change of the whole weight",
    )


def base_need(plan: LoadPlan) -> str | None:
    """The feature of an adapter that takes the base's weights to lower; None if none does."""
    need = plan.tuner.needs_base(plan.config)
    if need is not None and any(planned.module.headers for planned in plan.modules.values()):
        return need
    for planned in plan.modules.values():
        target = planned.target
        if planned.tokens is not None and isinstance(target, TargetLayer) and target.has_bias:
            return "trained tokens on a head with a bias"
    return None


def base_use(plan: LoadPlan) -> str | None:
    """What is compared with the base's weights where they are at hand, and lowers without; or None.

    The parts, and so the digest, may differ between the two.
    """
    copied = [planned.target.name for planned in plan.modules.values() if planned.copies]
    return f"the copy of the base weight of {listing(copied)}" if copied else None


def _require_base(plan: LoadPlan, weights: BaseWeights | None, subject: str) -> None:
    need = base_need(plan)
    if need is not None and weights is None:
        raise AdapterUnsupportedError(
            subject,
            f"{need} cannot be computed without the weights of the base model",
            "load it on a wrapped model, which hands them out",
        )


class _Assembly:
    """The lowering of one adapter's modules; collects what is wrong with their tensors."""

    def __init__(self, plan: LoadPlan, fetch: Fetch, weights: BaseWeights | None) -> None:
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        # Kept to the end, so that no other tensor can take the address of one.
        self._stored = fetch(plan.tensor_names)
        self._check_finite()
        self.stored = {tensor.data_ptr() for tensor in self._stored.values()}
        self._plan = plan
        self._weights = weights
        self._modules = tuple(
            planned.module for planned in plan.modules.values() if planned.module.headers
        )
        self._is_prepared = False
        self._made: Any = None

    def lower(self, planned: PlannedModule) -> AnyWeights:
        """The parts of one module."""
        if planned.whole:
            return self._whole(planned)
        if planned.tokens is not None:
            return self._rows(planned)
        copies = {part: self._fetch(name) for part, name in planned.copies.items()}
        if not self._changed(planned, copies):
            return self._own(planned, self._weights)
        if isinstance(planned.target, TargetEmbedding):
            parts = self._own(planned, self._weights)
            assert isinstance(parts, EmbeddingWeights)
            return replace(parts, weight=copies["weight"])
        return self._with_copy(planned, copies)

    def _own(self, planned: PlannedModule, weights: BaseWeights | None) -> AnyWeights:
        plan, module = self._plan, planned.module
        tensors = {part: self._fetch(header.name) for part, header in module.headers.items()}
        if self.findings:
            # Of numbers that are refused anyway nothing is computed.
            return LayerWeights()
        given = Lowering(tensors, weights, plan.max_rank, self._modules, self._prepared())
        return plan.tuner.lower(plan.config, module, given)

    def _prepared(self) -> Any:
        if not self._is_prepared:
            plan = self._plan
            shared = {part: self._fetch(name) for part, name in plan.shared.items()}
            given = Lowering(shared, self._weights, plan.max_rank, self._modules)
            self._made = plan.tuner.prepare(plan.config, given)
            self._is_prepared = True
        return self._made

    def _whole(self, planned: PlannedModule) -> AnyWeights:
        weight = self._fetch(planned.whole["weight"])
        bias = self._fetch(planned.whole["bias"]) if "bias" in planned.whole else None
        target = planned.target
        if isinstance(target, TargetEmbedding):
            return EmbeddingWeights(weight=weight)
        if not isinstance(target, TargetLayer):
            return NormWeights(weight, bias)
        return LayerWeights(
            weight=_row_major(weight, target), shift=None if bias is None else bias.float()
        )

    def _rows(self, planned: PlannedModule) -> AnyWeights:
        assert planned.tokens is not None
        rows, target = self._fetch(planned.tokens.tensor), planned.target
        ids, order = torch.tensor(planned.tokens.ids, dtype=torch.int64).sort()
        rows = rows[order]
        if not isinstance(target, TargetLayer):
            return EmbeddingWeights(token_ids=ids, tokens=rows)
        # Outputs of these tokens are products with the rows and nothing else.
        picks = torch.zeros(target.out_features, len(ids), dtype=rows.dtype)
        picks[ids, torch.arange(len(ids))] = 1
        gain = torch.ones(target.out_features)
        gain[ids] = 0
        shift = None
        if target.has_bias and self._weights is not None:
            bias = self._weights.bias(target.name)
            shift = None if bias is None else (1 - gain) * bias.float()
        return LayerWeights(low_rank=LowRank(rows, picks, 1.0), gain=gain, shift=shift)

    def _changed(self, planned: PlannedModule, copies: Mapping[str, torch.Tensor]) -> bool:
        """Whether copies of the base's weights are others than the base's, as far as is known."""
        if not copies:
            return False
        name, target, weights = planned.target.name, planned.target, self._weights
        if weights is None:
            return True
        weight = copies["weight"]
        if isinstance(target, TargetLayer):
            weight = _row_major(weight, target)
        same = torch.equal(weight.float(), weights.weight(name).float())
        if same and "bias" in copies:
            bias = weights.bias(name)
            same = bias is not None and torch.equal(copies["bias"].float(), bias.float())
        if same:
            self.notes.append(f"the copy of the base weight of {name!r} is the base's own")
        return not same

    def _with_copy(self, planned: PlannedModule, copies: Mapping[str, torch.Tensor]) -> AnyWeights:
        target = planned.target
        assert isinstance(target, TargetLayer)
        copy = _Copy(_row_major(copies["weight"], target), copies.get("bias"))
        parts = self._own(planned, copy)
        assert isinstance(parts, LayerWeights)
        if copy.stored_bias is None:
            return replace(parts, weight=copy.stored)
        # Beside a weight the base's bias is not added: what there is of one lies in the shift.
        bias = copy.stored_bias.float()
        bias = bias if parts.gain is None else parts.gain * bias
        shift = bias if parts.shift is None else parts.shift + bias
        return replace(parts, weight=copy.stored, shift=shift)

    def _check_finite(self) -> None:
        largest = magnitudes(tuple(self._stored.values()))
        for name, value in zip(self._stored, largest, strict=True):
            if not math.isfinite(value):
                what = "NaN" if math.isnan(value) else "infinity"
                text = f"tensor {name!r} holds {what}"
                self.findings.append(damaged(text, "train or save the adapter again"))

    def _fetch(self, name: str) -> torch.Tensor:
        return self._stored[name]


class _Copy:
    """The base weights of one linear as an adapter's file holds them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.stored = weight
        self.stored_bias = bias

    def weight(self, name: str) -> torch.Tensor:
        """The stored weight."""
        return self.stored.float()

    def bias(self, name: str) -> torch.Tensor | None:
        """The stored bias."""
        return None if self.stored_bias is None else self.stored_bias.float()


def _row_major(weight: torch.Tensor, target: TargetLayer) -> torch.Tensor:
    """A stored weight as `(N, K)`."""
    return weight.T.contiguous() if target.transposed else weight


def _lowered_findings(parts: Mapping[str, AnyWeights], stored: Iterable[int]) -> list[Finding]:
    """Findings about parts that came out as NaN or infinity though what was stored is finite."""
    known = set(stored)
    made = {
        f"{part} of {name!r}": tensor
        for name, weights in parts.items()
        for part, tensor in part_tensors(weights)
        if tensor.data_ptr() not in known and tensor.is_floating_point()
    }
    if not made:
        return []
    return [
        damaged(f"{what} is not finite, computed from finite tensors", "train the adapter again")
        for what, largest in zip(made, magnitudes(tuple(made.values())), strict=True)
        if not math.isfinite(largest)
    ]
