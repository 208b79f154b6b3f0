"""Adapters of every part for the small Llama, and their definition in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

import branchline
from branchline.adapters.weights import (
    AdapterWeights,
    EmbeddingWeights,
    LayerWeights,
    LowRank,
    NormWeights,
    RotationFactor,
    content_digest,
)
from tests.models import VOCABULARY, build

ROW_LENGTH = 7
DOWN = "model.layers.{}.mlp.down_proj"
QUERY, VALUE, GATE = (
    f"model.layers.{{}}.{n}" for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj")
)
SHAPES = {QUERY: (64, 64), VALUE: (32, 64), GATE: (128, 64), DOWN: (64, 128)}


class Random:
    """Random tensors, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * std

    def near_one(self, *shape: int) -> torch.Tensor:
        return 1 + self.normal(*shape, std=0.2)

    def low_rank(self, inputs: int, outputs: int, rank: int) -> LowRank:
        return LowRank(self.normal(rank, inputs), self.normal(outputs, rank), 0.5)

    def rotation(self, columns: int, block: int = 8) -> RotationFactor:
        order = torch.randperm(columns, generator=self._generator)
        raw = torch.randn(columns // block, block, block, generator=self._generator)
        return RotationFactor(torch.linalg.qr(raw).Q.contiguous(), order)


def on_linears(seed: int, targets: tuple[str, ...], *names: str) -> dict[str, LayerWeights]:
    random, made = Random(seed), {}
    for target in targets:
        outputs, inputs = SHAPES[target]
        for index in (0, 1):
            every = {
                "low_rank": random.low_rank(inputs, outputs, 2 + seed % 5),
                "gain": random.near_one(outputs),
                "shift": random.normal(outputs),
                "in_scale": random.near_one(inputs),
                "rotation": (random.rotation(inputs), random.rotation(inputs, 16)),
                "delta": random.normal(outputs, inputs, std=0.02),
                "weight": random.normal(outputs, inputs),
            }
            made[target.format(index)] = LayerWeights(**{name: every[name] for name in names})
    return made


def adapter(layers=None, embeddings=None, norms=None) -> AdapterWeights:
    groups = (layers or {}, embeddings or {}, norms or {})
    digest = content_digest(*groups)
    return AdapterWeights("memory", digest, groups[0], embeddings=groups[1], norms=groups[2])


def embedding_parts(seed: int, *names: str) -> dict[str, EmbeddingWeights]:
    random = Random(seed)
    low_rank = LowRank(random.normal(4, VOCABULARY), random.normal(64, 4), 2.0)
    every = {
        "low_rank": {"low_rank": low_rank},
        "tokens": {"token_ids": torch.arange(3, 200, 2), "tokens": random.normal(99, 64)},
        "weight": {"weight": random.normal(VOCABULARY, 64)},
    }
    parts = {key: value for name in names for key, value in every[name].items()}
    return {"model.embed_tokens": EmbeddingWeights(**parts)}


def norm_parts(seed: int, *names: str) -> dict[str, NormWeights]:
    random = Random(seed)
    return {name: NormWeights(random.near_one(64)) for name in names}


NORMS = ("model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm")
HEAD = {"lm_head": LayerWeights(weight=Random(40).normal(VOCABULARY, 64))}
ADAPTERS: Mapping[str, AdapterWeights] = {
    "lora": adapter(on_linears(1, (QUERY, VALUE, DOWN), "low_rank")),
    "ia3": adapter(on_linears(2, (VALUE,), "gain") | on_linears(3, (DOWN,), "in_scale")),
    "dora": adapter(on_linears(4, (QUERY, GATE), "low_rank", "gain", "shift")),
    "boft": adapter(on_linears(5, (QUERY, DOWN), "rotation", "gain")),
    "delta": adapter(on_linears(6, (VALUE, GATE), "delta")),
    "head": adapter(on_linears(7, (DOWN,), "weight", "shift") | HEAD),
    "gain": adapter(on_linears(8, (QUERY, DOWN), "gain", "shift")),
    "embedding": adapter(None, embedding_parts(9, "low_rank", "tokens")),
    "table": adapter(on_linears(10, (QUERY,), "low_rank"), embedding_parts(11, "weight")),
    "norms": adapter(on_linears(12, (VALUE,), "low_rank"), None, norm_parts(13, *NORMS)),
}
# --- the definition ----------------------------------------------------------------------------


def turned(x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
    if weights.in_scale is not None:
        x = x * weights.in_scale
    for factor in weights.rotation:
        x = x[..., factor.order] @ torch.block_diag(*factor.blocks)
    return x


class Defined(nn.Module):
    """A linear with one adapter, by the formula."""

    def __init__(self, base: nn.Module, weights: LayerWeights) -> None:
        super().__init__()
        self.base, self.weights = base, weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, fed = self.weights, turned(x, self.weights)
        out = self.base(fed) if w.weight is None else F.linear(fed, w.weight)
        out = out if w.gain is None else out * w.gain
        if w.low_rank is not None:
            out = out + F.linear(F.linear(x, w.low_rank.a), w.low_rank.b) * w.low_rank.scaling
        out = out if w.delta is None else out + F.linear(x, w.delta)
        return out if w.shift is None else out + w.shift


def table_of(base: torch.Tensor, weights: EmbeddingWeights) -> torch.Tensor:
    table = (base if weights.weight is None else weights.weight).clone()
    if weights.tokens is not None:
        table[weights.token_ids] = weights.tokens
    product = weights.low_rank
    return table if product is None else table + product.scaling * (product.b @ product.a).T


def defined(plain: nn.Module, weights: AdapterWeights | None) -> nn.Module:
    """A copy of the plain model that computes with one adapter, without any of our code."""
    model = copy.deepcopy(plain)
    if weights is None:
        return model
    for name, parts in weights.layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Defined(model.get_submodule(name), parts))
    for name, parts in weights.embeddings.items():
        module = model.get_submodule(name)
        module.weight = nn.Parameter(table_of(module.weight.data, parts))
    for name, parts in weights.norms.items():
        model.get_submodule(name).weight = nn.Parameter(parts.weight.clone())
    return model


def served(quant: str, dtype: torch.dtype = torch.float32, **settings) -> branchline.ServedModel:
    model = branchline.wrap(
        build("llama", dtype), quant=quant, max_loras=len(ADAPTERS), max_lora_rank=8, **settings
    )
    for name, weights in ADAPTERS.items():
        model.adapters.install(name, weights)
    return model
