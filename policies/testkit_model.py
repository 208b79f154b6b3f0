"""A small random model with adapters for `branchline.policies.testkit`: two sites, 3 linears."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..adapters.base import BaseFacts, TargetLayer
from ..adapters.manager import AdapterManager
from ..adapters.tiers import TierLimits
from ..core.oracle import ActivationSemantics, NormSemantics, Semantics
from ..core.platform import detect_platform
from ..core.quantized_activation import QuantizedActivation
from ..core.scheme import SCHEMES
from ..fusion.raw import compute_raw
from ..fusion.registry import REGISTRY
from ..fusion.site import Site, SiteFacts
from ..linear.contract import InputContract, InputScale
from ..linear.kernels.build import build_kernel
from ..linear.quantized_weight import QuantizedWeight
from ..linear.registry import LayerRegistry, SharedInput
from ..linear.routed import RoutedLinear
from .base import Policy
from .plan import Plan
from .planner import Planner

COLUMNS, INNER = 64, 128
#: Output and input features of each linear.
SHAPES = {"q": (48, COLUMNS), "k": (32, COLUMNS), "down": (COLUMNS, INNER)}
#: Who reads what each site makes.
CONSUMERS = {"norm": ("q", "k"), "act": ("down",)}
RANKS = (1, 4, 16, 64, 80)
_SLOTS = 4
_CPU = torch.device("cpu")
_DTYPE = torch.bfloat16


class SmallModel:
    """A norm that feeds `q` and `k`, and a gated activation that feeds `down`.

    Args:
        policy: that routes its sites.
        scheme: of its linears, one of `branchline.core.SCHEMES`.
        seed: of weights.
    """

    def __init__(self, policy: Policy, scheme: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._normal = partial(torch.randn, generator=generator)
        self.platform = detect_platform(_CPU)
        self.registry = LayerRegistry()
        for index, name in enumerate(SHAPES):
            kernel = self._kernel(name, scheme)
            layer = RoutedLinear(name, index, kernel, self.registry, _DTYPE, _CPU)
            self.registry.add(layer)
        self.norm_weight = (1 + 0.2 * self._normal(COLUMNS)).to(_DTYPE)
        self.gate_up = (self._normal(2, COLUMNS, INNER) / 8).to(_DTYPE)
        self.sites = (
            self._site(0, "norm", NormSemantics("llama", 1e-6), COLUMNS),
            self._site(1, "act", ActivationSemantics("silu", gated=True), INNER),
        )
        self.planner = Planner(
            self.registry, self.sites, REGISTRY, self.platform, policy,
            adapters_possible=True, lora_dtype=_DTYPE,
        )  # fmt: skip
        targets = {name: TargetLayer(name, i, o) for name, (o, i) in SHAPES.items()}
        self.adapters = AdapterManager(
            self.registry,
            BaseFacts(targets, ("", "model", *targets), "CAUSAL_LM", None, "small"),
            limits=TierLimits({max(RANKS): _SLOTS}),
            dtype=_DTYPE,
            device=_CPU,
            plan=self.planner.plan_batch,
        )
        self.registry.serve_base_batches_from(self.adapters.base_batch)

    def _kernel(self, name: str, scheme: str) -> Any:
        wanted, shape = SCHEMES[scheme], SHAPES[name]
        weight = QuantizedWeight.from_float(self._normal(shape) / 8, name, wanted.weight)
        key = wanted.input
        scale = InputScale.checked(0.02, name) if key is not None and key.static else None
        return build_kernel(name, weight, None, InputContract(key, scale), self.platform)

    def _site(self, index: int, name: str, semantics: Semantics, columns: int) -> Site:
        consumers = CONSUMERS[name]
        kind = "norm" if name == "norm" else "activation"
        facts = SiteFacts(name, kind, semantics, "", columns, _DTYPE, consumers)
        layers = tuple(self.registry.layers[consumer] for consumer in consumers)
        site = Site(facts, index, self.registry, layers, partial(compute_raw, semantics), {})
        self.registry.share_input(SharedInput(consumers, site.other_readers))
        return site

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """(..., 144): the outputs of all linears for `x` (..., 64), side by side."""
        norm, act = self.sites
        normed: torch.Tensor | QuantizedActivation = norm(x, self.norm_weight)
        # Row by row by one kernel, whatever the number of rows: these are not what is tested.
        gate, up = ((x.unsqueeze(-2).float() @ w.float()).squeeze(-2) for w in self.gate_up)
        made = act(gate.to(_DTYPE), up.to(_DTYPE))
        linears = self.registry.layers
        outs = (linears["q"](normed), linears["k"](normed), linears["down"](made))
        return torch.cat([out.reshape(*x.shape[:-1], -1) for out in outs], -1)

    def plan(self, names: Sequence[str | None]) -> Plan:
        """The plan of a batch with these rows, which is not packed."""
        with self.adapters.rows(names) as batch:
            assert isinstance(batch.plan, Plan)
            return batch.plan


def write_adapter(
    folder: Path, targets: Mapping[str, int], seed: int, settings: Mapping[str, Any]
) -> Path:
    """A PEFT folder of random LoRA.

    Args:
        folder: to make.
        targets: rank by the linear.
        seed: of its weights.
        settings: further entries of its configuration.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    rank = max(targets.values())
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "target_modules": list(targets), "rank_pattern": dict(targets),
        "alpha_pattern": dict(targets), **settings,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {}
    for name, own in targets.items():
        outputs, inputs = SHAPES[name]
        prefix = f"base_model.model.{name}"
        a, b = (own, inputs), (outputs, own)
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(a, generator=generator) / 8
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(b, generator=generator) / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_targets(choice: random.Random) -> dict[str, int]:
    """Some of the linears, each with a rank."""
    names = choice.sample(sorted(SHAPES), choice.randint(1, len(SHAPES)))
    return {name: choice.choice(RANKS) for name in names}
