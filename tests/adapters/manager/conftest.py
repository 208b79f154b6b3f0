"""A model of two linears, adapters for it that are written in a millisecond, and a manager."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import reduce
from operator import or_
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from branchline.adapters.base import BaseFacts, TargetLayer
from branchline.adapters.manager import AdapterManager
from branchline.adapters.tiers import Eviction, TierLimits
from branchline.linear.batch import BarePlan
from branchline.linear.batch_class import BatchClass
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.registry import LayerRegistry
from branchline.linear.routed import RoutedLinear

K = 8
SHAPES = {"model.first": (K, K), "model.second": (12, K)}


class World:
    """A registry, a manager, and what all rows of a batch come to."""

    def __init__(self, limits: TierLimits, **options) -> None:
        self.registry = LayerRegistry()
        generator = torch.Generator().manual_seed(5)
        for index, (name, shape) in enumerate(SHAPES.items()):
            linear = nn.Linear(shape[1], shape[0], bias=False)
            linear.weight.data = torch.randn(shape, generator=generator)
            kernel = FloatLinear(linear)
            dtype, device = torch.float32, torch.device("cpu")
            layer = RoutedLinear(name, index, kernel, self.registry, dtype, device)
            self.registry.add(layer)
        self.x = torch.randn(1, K, generator=generator)
        self.plans = 0
        layers = {name: TargetLayer(name, i, o) for name, (o, i) in SHAPES.items()}
        self.manager = AdapterManager(
            self.registry,
            BaseFacts(layers, ("", "model", *layers), "CAUSAL_LM", None, "test"),
            limits=limits,
            dtype=torch.float32,
            device=torch.device("cpu"),
            plan=self._plan,
            **options,
        )
        self.registry.serve_base_batches_from(self.manager.base_batch)

    def _plan(self, live: Mapping[int, str], mixtures: bool, batch: BatchClass) -> BarePlan:
        self.plans += 1
        held = [self.registry.branches(layer, live.keys()).values() for layer in self.registry]
        return BarePlan(
            (),
            tuple(bool(holders) for holders in held),
            tuple(reduce(or_, (holder.parts for holder in holders), 0) for holders in held),
            tuple(max((h.shrink_rank or 0 for h in holders), default=0) for holders in held),
        )

    def forward(self, rows: int = 1) -> torch.Tensor:
        """The outputs of all layers for `rows` equal rows, side by side."""
        x = self.x.expand(rows, K).contiguous()
        return torch.cat([layer(x) for layer in self.registry], 1)

    def answer(self, *names: str | None) -> torch.Tensor:
        """What rows with these adapters come to; of base rows outside of any batch for none."""
        with self.manager.rows(names) if names else nullcontext():
            return self.forward(max(len(names), 1))

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that host memory holds."""
        versions = self.manager._store._by_digest.values()
        return [t for v in versions if v.weights is not None for t in v.weights.tensors]

    def slot_of(self, name: str) -> int | None:
        return self.manager.info(name).slot

    def resident(self) -> set[str]:
        return {info.name for info in self.manager.list() if info.slot is not None}


@pytest.fixture
def world() -> Callable[..., World]:
    """A maker of worlds: so many slots of rank 4 (or slots by rank), and limits of host memory."""

    def make(
        slots: int | Mapping[int, int] = 2,
        *,
        adapters: int | None = None,
        nbytes: int | None = None,
        eviction: str = "lru",
        **options,
    ) -> World:
        by_rank = {4: slots} if isinstance(slots, int) else slots
        limits = TierLimits(by_rank, adapters, nbytes, Eviction(eviction))
        return World(limits, **options)

    return make


def write_adapter(folder: Path, seed: int, rank: int = 2, layers: tuple[str, ...] = ()) -> Path:
    """An adapter folder; other seeds make other contents."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    names = layers or tuple(SHAPES)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name.rpartition(".")[2] for name in names],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name in names:
        outputs, inputs = SHAPES[name]
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def adapter(tmp_path) -> Callable[..., Path]:
    """A maker of adapter folders, by name; see `write_adapter`."""

    def make(name: str, seed: int | None = None, **settings) -> Path:
        return write_adapter(tmp_path / name, sum(map(ord, name)) if seed is None else seed,
                             **settings)  # fmt: skip

    return make
