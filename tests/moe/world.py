"""The experts of a tiny model without the rest of it, and made-up adapters on them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

import torch

from branchline.core.platform import detect_platform
from branchline.core.route import Route
from branchline.core.scheme import SCHEMES
from branchline.fusion import REGISTRY
from branchline.fusion.discover import discover
from branchline.fusion.experts import RoutedExperts
from branchline.linear.batch import Batch, BatchScope
from branchline.linear.branching import BranchInput
from branchline.linear.calibration import Calibration
from branchline.linear.experts.rows import PairRows
from branchline.linear.outputs import Shrink
from branchline.linear.registry import Holder, Holding, LayerRegistry
from branchline.linear.shrink import shrink
from branchline.policies.planner import Planner
from branchline.policies.policy import make_policy
from branchline.serving.experts import ModelExperts
from tests.moe.models import build, token_ids

RANK, WIDTH = 3, 4
ONE_LAYER = {
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "nemotron_h": {"num_hidden_layers": 2, "layers_block_type": ["attention", "moe"]},
}


class World:
    """The experts of one tiny model and nothing else of it, with a planner of their sites."""

    def __init__(
        self,
        kind: str,
        scheme: str | None = None,
        policy: str = "dynamic",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = build(kind, dtype=dtype, **ONE_LAYER.get(kind, {"num_hidden_layers": 1}))
        self.original = next(m for m in self.model.modules() if hasattr(m, "is_transposed"))
        self.registry = LayerRegistry()
        self.undo = ExitStack()
        platform = detect_platform(torch.device("cpu"))
        experts = ModelExperts(self.model, self.registry, self.undo, None, {})
        experts.route(platform)
        found = discover(self.model, self.registry, {"input_ids": token_ids(2, 5)})
        if scheme is not None:
            ranges = Calibration(dict.fromkeys(experts.projections, 6.0), 100.0, 1)
            given = ranges if SCHEMES[scheme].calibrated else None
            experts.quantize(SCHEMES[scheme], (), given, platform)
        found.install()
        self.experts = next(m for m in self.model.modules() if isinstance(m, RoutedExperts))
        self.planner = Planner(
            self.registry,
            found.sites,
            REGISTRY,
            platform,
            make_policy(policy),
            adapters_possible=True,
            lora_dtype=torch.float32,
        )
        self.registry.serve_base_batches_from(lambda: Batch(self.planner.plan({})))

    @property
    def hidden(self) -> int:
        return self.experts.form.hidden

    def routing(self, tokens: int, top_k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(tokens, self.experts.form.experts, generator=generator)
        weights, index = scores.topk(top_k, -1)
        return index, weights

    def tokens(self, number: int, seed: int = 1) -> torch.Tensor:
        x = torch.randn(number, self.hidden, generator=torch.Generator().manual_seed(seed))
        return x.to(self.experts.down.dtype)


@cache
def untouched(kind: str, scheme: str | None = None) -> World:
    """A world that tests leave as it is."""
    return World(kind, scheme)


def ran(world: World) -> dict[Route, int]:
    assert world.experts.site is not None
    return world.experts.site.counters.routes()


class Products:
    """A low-rank product for each slot and expert."""

    compact_raw = False

    def __init__(self, layer, slots: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.name, self.experts = layer.name, layer.experts
        number = slots * layer.experts
        self.a = torch.randn(number, WIDTH, layer.in_features, generator=generator)
        self.b = torch.randn(number, layer.out_features, RANK, generator=generator) * 0.1
        self.ranks = torch.full((number,), RANK, dtype=torch.int32)

    def _request(self, rows: PairRows, place: int) -> Shrink:
        slots = rows.slots(place)
        own = torch.where(slots >= 0, slots * self.experts + rows.pairs.expert, -1)
        return Shrink.stacked(self.name, self.a, self.ranks, own.to(torch.int32), RANK)

    def shrink_request(self, rows: PairRows, place: int, rank: int) -> Shrink:
        return self._request(rows, place)

    def add(self, out, x: BranchInput, rows: PairRows, place: int) -> torch.Tensor:
        request = self._request(rows, place)
        found = x.shrunk()
        if found is None:
            found = self._shrunk(x, request)
        here = request.slots >= 0
        b = self.b[request.slots.clamp(min=0)]
        branch = torch.einsum("pr,pnr->pn", found[:, :RANK], b)
        return torch.where(here.unsqueeze(1), (out.float() + branch).to(out.dtype), out)

    def _shrunk(self, x: BranchInput, request: Shrink) -> torch.Tensor:
        raw = x.raw()
        if not raw.compact:
            return shrink(raw.values, request)
        whole = raw.values.new_full((len(request.slots), raw.values.shape[-1]), torch.nan)
        whole[request.slots >= 0] = raw.values
        return shrink(whole, request)


#: Adapter 7 on both projections, adapter 8 on the second alone, adapter 9 on the first alone.
HOLDINGS = {7: (True, True), 8: (False, True), 9: (True, False)}
NAMES = {7: "both", 8: "down", 9: "up"}


def with_adapters(world: World) -> list[tuple[int, ...]]:
    """Give the experts branches; slots of each adapter by layer."""
    layers = (world.experts.up, world.experts.down)
    holdings = {}
    for key, held in HOLDINGS.items():
        names = [layer.name for layer, there in zip(layers, held, strict=True) if there]
        holdings[key] = Holding(NAMES[key], dict.fromkeys(names, Holder(shrink_rank=RANK)))
    for seed, layer in enumerate(layers):
        layer.branch = Products(layer, len(HOLDINGS), seed)
    world.registry.set_holdings(holdings, (), "a test")
    return [tuple(i if held[j] else -1 for i, held in enumerate(HOLDINGS.values())) for j in (0, 1)]


def run_rows(world: World, rows: list[int], tokens: int, *, packed: bool = False, seed: int = 3):
    """The experts on `tokens` tokens of each row; a row's number is its adapter's slot, or -1."""
    by_layer = [*with_adapters(world)]
    live = {key: NAMES[key] for i, key in enumerate(HOLDINGS) if i in rows}
    plan = world.planner.plan(live)
    slots = torch.full((len(world.registry), len(rows)), -1, dtype=torch.int32)
    for layer, held in zip((world.experts.up, world.experts.down), by_layer, strict=True):
        slots[layer.index] = torch.tensor([held[row] if row >= 0 else -1 for row in rows])
    if packed:
        slots = slots.repeat_interleave(tokens, 1)
    each = None if packed else tokens
    batch = Batch(plan, slots.shape[1], slots, packed=packed, row_tokens=each)
    total = tokens * len(rows)
    x, (index, weights) = world.tokens(total, seed), world.routing(total, 2, seed)
    with BatchScope(world.registry.owner, batch):
        return world.experts(x, index, weights), batch
