"""What transformers' tensor-parallel plan did to a model, and one rank's linears as plain ones.

transformers cuts parameters into `DTensor`s and puts, on each module of the plan, a forward around
the module's own that exchanges inputs and outputs.  Here the parameters become this rank's plain
tensors and the forward is taken off; in its place, `ShardedLinear` joins the outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...core.errors import WrapError
from ...linear.base_weights import BaseWeightsOf
from ...linear.experts.find import holds_experts
from ...linear.experts.shard import ExpertsShard
from ...linear.registry import LayerRegistry
from ...linear.routed import RoutedLinear
from ...linear.sharded import LinearShard, ShardedLinear, Split, even_edges
from ...linear.weights import kind_refusal
from .base_weights import SplitBaseWeights
from .ranks import Ranks

# The names of transformers' styles that linears are split by.
_LINEAR_STYLES = {
    "colwise": Split.COLUMN,
    "colwise_gather_output": Split.GATHERED,
    "colwise_rep": Split.GATHERED,
    "rowwise": Split.ROW,
}
# Whole experts on each rank: of the experts module, and of its parameters.
_EXPERT_STYLES = ("ep_dispatch_experts", "grouped_gemm")
# Their forward gives whole outputs; what they exchange is no matter of a linear.
_EMBEDDING_STYLES = ("embedding_rowwise", "embedding_colwise")
# Every rank has the whole module, and its forward exchanges nothing but gradients.
_WHOLE_STYLES = ("replicate", "replicated_with_grad_allreduce")
_SERVED = ", ".join((*_LINEAR_STYLES, *_EXPERT_STYLES, *_EMBEDDING_STYLES, *_WHOLE_STYLES))
_ONE_RANK = "load it on one rank"

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class SplitModel:
    """Which modules of a model are split over ranks, and how; all empty where none is.

    Attributes:
        shards: this rank's part of each split linear, by its full name.
        experts: this rank's experts of each layer whose experts are split, by their full name.
        embeddings: names of split embeddings; their outputs are whole on every rank.
        whole: modules that a plan names, and that are whole on every rank.
        ranks: of the replica; None where there is but one.
    """

    shards: Mapping[str, LinearShard] = field(default_factory=lambda: _NONE)
    experts: Mapping[str, ExpertsShard] = field(default_factory=lambda: _NONE)
    embeddings: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    ranks: Ranks | None = None

    @classmethod
    def of(cls, model: nn.Module, undo: ExitStack) -> SplitModel:
        """Look at a model as transformers has loaded it.

        Args:
            model: all ranks pass theirs at the same time.
            undo: closes what is opened.

        Raises:
            WrapError: split in a way that is not served: by another parallel style, over more than
                one dimension of ranks, or not by a plan.
        """
        if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return cls()
        _refuse_other_kinds(model)
        found = _Reader(model).read()
        if found.ranks is not None:
            undo.callback(found.ranks.close)
        return found

    def localize(self, model: nn.Module, undo: ExitStack) -> None:
        """Make plain linears of this rank's parts, for the time until `undo`.

        Args:
            model: the one that was looked at.
            undo: takes everything back.
        """
        for name, shard in self.shards.items():
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            _take_forward_off(linear, undo)
            _use_part(linear, shard, undo)
        for name in self.experts:
            experts = model.get_submodule(name)
            _take_forward_off(experts, undo)
            _use_own_experts(experts, undo)
        for name in self.whole:
            _take_forward_off(model.get_submodule(name), undo)

    def linear_class(self, name: str) -> Callable[..., RoutedLinear]:
        """What makes the routed linear of that name; takes what `RoutedLinear` does."""
        shard = self.shards.get(name)
        return RoutedLinear if shard is None else partial(ShardedLinear, shard=shard)

    def base_weights(self, model: nn.Module, registry: LayerRegistry) -> BaseWeightsOf:
        """The weights of the whole linears, for adapters that are computed with them."""
        if self.ranks is None:
            return BaseWeightsOf(model, registry)
        return SplitBaseWeights(model, registry, self.ranks)


def _refuse_other_kinds(model: nn.Module) -> None:
    if isinstance(model, PeftModel):
        raise WrapError(
            "a PeftModel",
            "its base model is split over ranks, and the adapters in it are not",
            "wrap the base model, and load the adapters from their folders",
        )
    settings = getattr(getattr(model, "config", None), "distributed_config", None)
    tensor_ranks = getattr(settings, "tp_size", 1) or 1
    for kind, size in (("pipeline", "pp_size"), ("data", "dp_size"), ("expert", "ep_size")):
        ranks = getattr(settings, size, 1) or 1
        if kind == "expert" and ranks == tensor_ranks:
            # All ranks see the same batch: each computes the pairs of its own experts.
            continue
        if ranks > 1:
            raise WrapError(
                f"model {type(model).__qualname__}",
                f"is {kind}-parallel over {ranks} ranks; tensor parallelism is served, and experts "
                "that are split over the same ranks",
                f"load it with {size}={tensor_ranks if kind == 'expert' else 1}",
            )


class _Reader:
    """One look at a model; see `SplitModel.of`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        plans = (getattr(model, kind, None) or {} for kind in ("tp_plan", "ep_plan"))
        # Where both name a module, transformers goes by the second.
        self._plan: Mapping[str, str] = {k: v for plan in plans for k, v in plan.items()}
        self._shards: dict[str, LinearShard] = {}
        self._experts: dict[str, ExpertsShard] = {}
        self._embeddings: list[str] = []
        self._whole: list[str] = []
        self._group: dist.ProcessGroup | None = None

    def read(self) -> SplitModel:
        for name, module in self._model.named_modules():
            style = self._style(name)
            split = [f"{name}.{key}" for key, _ in _split_parameters(module)]
            if style is not None or split:
                self._enter(name, module, style, split)
        return SplitModel(
            MappingProxyType(self._shards),
            MappingProxyType(self._experts),
            tuple(self._embeddings),
            tuple(self._whole),
            None if self._group is None else Ranks(self._group),
        )

    def _style(self, name: str) -> str | None:
        # A plan names the layers of a stack in one entry.
        return self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    def _enter(self, name: str, module: nn.Module, style: str | None, split: list[str]) -> None:
        if style is None:
            style = next(filter(None, map(self._style, split)), None)
        if style in _LINEAR_STYLES:
            self._shards[name] = self._shard(name, module, style)
        elif style in _EXPERT_STYLES and holds_experts(module):
            self._experts[name] = self._experts_shard(name, module)
        elif style in _EMBEDDING_STYLES and isinstance(module, nn.Embedding):
            self._mesh(name, module)
            self._embeddings.append(name)
        elif style in _WHOLE_STYLES and not split:
            self._whole.append(name)
        else:
            by = f"the parallel style {style!r}" if style else "no tensor-parallel plan"
            raise WrapError(
                f"module '{name}' ({type(module).__qualname__})",
                f"is split over ranks by {by}, which is not served",
                f"load the model with a tp_plan of {_SERVED} alone, or {_ONE_RANK}",
            )

    def _mesh(self, name: str, module: nn.Module) -> tuple[Any, DTensor]:
        parameter = next(iter(dict(_split_parameters(module)).values()), None)
        if parameter is None:
            raise WrapError(
                f"module '{name}'",
                "is named by the model's tp_plan, but its parameters are not split",
                "load the model with distributed_config=DistributedConfig(tp_size=...)",
            )
        mesh = parameter.device_mesh
        if mesh.ndim != 1:
            raise WrapError(
                f"module '{name}'",
                f"is split over {mesh.ndim} dimensions of ranks, and only one is served",
                "load the model tensor-parallel alone",
            )
        group = mesh.get_group()
        self._group = self._group or group
        return mesh, parameter

    def _experts_shard(self, name: str, module: nn.Module) -> ExpertsShard:
        mesh, _ = self._mesh(name, module)
        for key, parameter in module.named_parameters(recurse=False):
            placed = parameter.placements if isinstance(parameter, DTensor) else "whole"
            if placed != (Shard(0),):
                raise WrapError(
                    f"parameter '{name}.{key}'",
                    f"is {placed}, where experts are split one by one ({Shard(0)})",
                    f"load the model with the expert-parallel plan of its config, or {_ONE_RANK}",
                )
        whole = module.get_parameter("down_proj").shape[0]
        if whole % mesh.size():
            raise WrapError(
                f"experts '{name}'",
                f"are {whole}, which {mesh.size()} ranks cannot share evenly",
                f"use ranks that divide {whole}",
            )
        return ExpertsShard(mesh.get_local_rank(), whole // mesh.size(), mesh.get_group())

    def _shard(self, name: str, module: nn.Module, style: str) -> LinearShard:
        split = _LINEAR_STYLES[style]
        reason = kind_refusal(module, own_forward=False)
        if reason is not None or not isinstance(module, nn.Linear):
            raise WrapError(
                f"module '{name}'",
                f"is split over ranks by the parallel style {style!r}, and {reason}",
                f"leave it out of the tp_plan, or {_ONE_RANK}",
            )
        mesh, _ = self._mesh(name, module)
        weight = module.weight
        placed = Shard(1 if split == Split.ROW else 0)
        if not isinstance(weight, DTensor) or weight.placements != (placed,):
            found = weight.placements if isinstance(weight, DTensor) else "whole"
            raise WrapError(
                f"module '{name}'",
                f"its weight is {found}, where the parallel style {style!r} wants {placed}",
                f"leave it out of the tp_plan, or {_ONE_RANK}",
            )
        edges = even_edges(weight.shape[placed.dim], mesh.size())
        shard = LinearShard(split, mesh.get_local_rank(), edges, mesh.get_group(), weight.shape[0])
        own = shard.own.stop - shard.own.start
        if not own or weight.to_local().shape[placed.dim] != own:
            raise WrapError(
                f"module '{name}'",
                f"has {weight.to_local().shape[placed.dim]} of {edges[-1]} on rank {shard.rank}, "
                f"where an even split has {own}",
                f"use ranks that divide {edges[-1]}",
            )
        return shard


def _split_parameters(module: nn.Module) -> Iterator[tuple[str, DTensor]]:
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            yield name, parameter


def _take_forward_off(module: nn.Module, undo: ExitStack) -> None:
    own: dict[str, Any] = vars(module)
    forward: Callable[..., Any] | None = own.pop("forward", None)
    if forward is not None:
        undo.callback(own.__setitem__, "forward", forward)


def _use_part(linear: nn.Linear, shard: LinearShard, undo: ExitStack) -> None:
    """Let `linear` be the linear of this rank's part."""
    for name in ("weight", "bias", "in_features", "out_features"):
        undo.callback(setattr, linear, name, getattr(linear, name))
    weight, bias = _local(linear.weight), linear.bias
    if shard.by_rows:
        # Partial sums are added up, so that one rank alone may add the bias.
        part = None if bias is None or shard.rank else _whole(bias)
    else:
        part = None if bias is None else _local(bias)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter(
        "bias", None if part is None else nn.Parameter(part, requires_grad=False)
    )
    linear.out_features, linear.in_features = weight.shape


def _use_own_experts(experts: nn.Module, undo: ExitStack) -> None:
    """Let a layer's experts be those of this rank."""
    for name, parameter in tuple(experts.named_parameters(recurse=False)):
        undo.callback(setattr, experts, name, parameter)
        setattr(experts, name, nn.Parameter(_local(parameter), requires_grad=False))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _whole(bias: torch.Tensor) -> torch.Tensor:
    assert not isinstance(bias, DTensor) or bias.placements == (Replicate(),)
    return _local(bias)
