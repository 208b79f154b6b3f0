"""What reading an adapter needs to know of the base model; no tensors, no modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from .identity import BaseIdentity

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TargetLayer:
    """A linear of the base model that may take a branch.

    Args:
        name: full name in the model ("model.layers.0.self_attn.q_proj").
        in_features: K, the size of the input.
        out_features: N, the size of the output.
        refusal: why it cannot take a branch; None says it can.
        has_bias: whether it adds a bias.
        transposed: whether its weight lies as `(K, N)` (transformers' `Conv1D`).
    """

    name: str
    in_features: int
    out_features: int
    refusal: str | None = None
    has_bias: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class TargetEmbedding:
    """An embedding of the base model that may take an adapter.

    Args:
        name: full name in the model ("model.embed_tokens").
        num_embeddings: V, the number of its rows.
        embedding_dim: D, the size of a row.
        refusal: why it cannot take an adapter; None says it can.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    refusal: str | None = None


@dataclass(frozen=True)
class TargetNorm:
    """A norm of the base model that may take weights of an adapter's own.

    Args:
        name: full name in the model ("model.layers.0.input_layernorm").
        size: K, the size of its weight.
        has_bias: whether it has a bias of the same size.
        refusal: why it cannot; None says it can.
    """

    name: str
    size: int
    has_bias: bool = False
    refusal: str | None = None


@dataclass(frozen=True)
class TargetExperts:
    """One projection of all experts of a layer, which may take a branch for each of them.

    A router's weight is one too, of one expert.

    Args:
        name: of the experts and the parameter ("model.layers.0.mlp.experts.gate_up_proj").
        experts: E, how many there are.
        in_features: K, the size of an expert's input.
        out_features: N, the size of an expert's output.
        refusal: why it cannot take a branch; None says it can.
        interleaved: the model's own parameter has gates and ups in turns; outputs of a branch are
            all gates, then all ups.
        transposed: the model's own parameter lies as `(E, K, N)`.
        linears: what checkpoints that keep each expert apart call its linears ("w1", "w3"), in the
            order of their outputs; empty where there are no such checkpoints.
        earlier: what those checkpoints call the experts; empty for as the model does.
        is_router: it is the weight of a router, as a parameter of one expert.
    """

    name: str
    experts: int
    in_features: int
    out_features: int
    refusal: str | None = None
    interleaved: bool = False
    transposed: bool = False
    linears: tuple[str, ...] = ()
    earlier: str = ""
    is_router: bool = False

    @property
    def module(self) -> str:
        """The name of the experts."""
        return self.name.rpartition(".")[0]

    @property
    def linear_features(self) -> int:
        """N of one of `linears`."""
        return self.out_features // max(len(self.linears), 1)


Target = TargetLayer | TargetEmbedding | TargetNorm | TargetExperts
_Kind = TypeVar("_Kind", TargetLayer, TargetEmbedding, TargetNorm, TargetExperts)


@dataclass(frozen=True)
class BaseFacts:
    """What reading an adapter needs to know of the base model; no tensors.

    Args:
        layers: every linear (`nn.Linear` or transformers' `Conv1D`) by its full name.
        modules: the names of all modules, linears included; tells "no linear" from "unknown".
        task: the PEFT task type the model's class stands for (CAUSAL_LM, SEQ_CLS, ...;
            FEATURE_EXTRACTION for a bare encoder or decoder).
        output_embedding: the name of the head that `get_output_embeddings` returns, if any.
        model_type: `config.model_type`, for PEFT's default targets.
        embeddings: every `nn.Embedding` by its full name.
        norms: every module of one weight `(K,)`, with or without a bias, by its full name.
        input_embedding: the name of what `get_input_embeddings` returns, if any.
        tied_head: whether the head's weight is the input embedding's.
        identity: which model it is, to be compared with the one an adapter names.
        experts: every projection of experts by its full name; those of one layer in the order in
            which its module registers its parameters.
    """

    layers: Mapping[str, TargetLayer]
    modules: tuple[str, ...]
    task: str
    output_embedding: str | None
    model_type: str
    embeddings: Mapping[str, TargetEmbedding] = field(default_factory=lambda: _NOTHING)
    norms: Mapping[str, TargetNorm] = field(default_factory=lambda: _NOTHING)
    input_embedding: str | None = None
    tied_head: bool = False
    identity: BaseIdentity = field(default_factory=BaseIdentity)
    experts: Mapping[str, TargetExperts] = field(default_factory=lambda: _NOTHING)

    @property
    def targets(self) -> Mapping[str, Target]:
        """Linears, embeddings, norms and projections of experts by their full names."""
        return {**self.layers, **self.embeddings, **self.norms, **self.experts}

    @property
    def refusals(self) -> Mapping[str, str]:
        """Why some of the targets cannot take an adapter, by name."""
        return {name: t.refusal for name, t in self.targets.items() if t.refusal is not None}

    def with_base_rules(self, *, allow_mismatch: bool, reads_folders: bool) -> BaseFacts:
        """These facts, with how strictly an adapter's base is compared; see `BaseIdentity`."""
        identity = replace(
            self.identity, allow_mismatch=allow_mismatch, reads_folders=reads_folders
        )
        return replace(self, identity=identity)

    def with_refusals(self, refusals: Mapping[str, str]) -> BaseFacts:
        """These facts, with the reasons why some modules cannot take an adapter.

        A reason of experts is one of all their projections.
        """
        of_experts = {
            name: refusals[target.module]
            for name, target in self.experts.items()
            if target.module in refusals
        }
        return replace(
            self,
            layers=_refuse(self.layers, refusals),
            embeddings=_refuse(self.embeddings, refusals),
            norms=_refuse(self.norms, refusals),
            experts=_refuse(self.experts, {**of_experts, **refusals}),
        )


def _refuse(targets: Mapping[str, _Kind], refusals: Mapping[str, str]) -> dict[str, _Kind]:
    return {
        name: replace(target, refusal=refusals.get(name, target.refusal))
        for name, target in targets.items()
    }


class BaseWeights(Protocol):
    """Where an adapter's lowering gets what it needs of the base's own weights.

    Both are asked for a full name out of `BaseFacts` and may be asked more than once.
    """

    def weight(self, name: str) -> torch.Tensor:
        """Of a linear `(N, K)`, dequantised, whatever its layout; of an embedding `(V, D)`; both
        float32 on the CPU."""
        ...

    def bias(self, name: str) -> torch.Tensor | None:
        """Of a linear `(N,)` float32 on the CPU; None where it has none."""
        ...
