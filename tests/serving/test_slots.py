"""Slots of several ranks and small tiers, on a whole model."""

from __future__ import annotations

import pytest
import torch

from branchline.adapters.tiers import Eviction
from branchline.core import native
from branchline.core.errors import AdapterCapacityError
from branchline.serving.config import WrapConfig
from tests.models import token_ids

IDS = token_ids(2, 7)
RANKS = {"attn": 8, "mlp": 4, "all": 16}


def answer(served, *names: str) -> torch.Tensor:
    with served.adapters.rows(names):
        return served(IDS).logits


@pytest.mark.parametrize("policy", ["dynamic", "absorbed"])
def test_slots_by_rank_give_the_same_bytes(llama, policy):
    roomy = llama.served(policy=policy)
    names = [(a, b) for a in RANKS for b in RANKS]
    expected = {pair: answer(roomy, *pair) for pair in names}
    served = llama.wrap(policy=policy, lora_slots={4: 1, 8: 1, 16: 1}, max_cpu_loras=1)
    for name, folder in llama.folders.items():
        served.adapters.load(name, folder)
    for pair in names:
        assert torch.equal(answer(served, *pair), expected[pair])
    layer = served.registry.layers["model.layers.0.mlp.down_proj"]
    assert layer.branch.nbytes < roomy.registry.layers[layer.name].branch.nbytes


def test_evicted_adapters_come_back(llama):
    roomy = llama.served()
    expected = {name: answer(roomy, name, name) for name in RANKS}
    served = llama.wrap(max_loras=1, max_cpu_loras=0, eviction="lfu")
    for name, folder in llama.folders.items():
        served.adapters.load(name, folder)
    for name in [*RANKS, *reversed(RANKS)]:
        assert torch.equal(answer(served, name, name), expected[name])
    with pytest.raises(AdapterCapacityError, match="max_loras=1"):
        answer(served, "attn", "mlp")
    assert {info.name for info in served.adapters.list()} == set(RANKS)
    assert str(served.audit())


def test_settings_say_what_fits_where():
    limits = WrapConfig.checked(lora_slots=" 64:4, 8:100").tier_limits
    assert dict(limits.slots) == {8: 100, 64: 4}
    assert (limits.count, limits.width) == (104, 64)
    assert WrapConfig.checked(lora_slots={64: 4, 8: 100}).lora_slots == "8:100,64:4"
    limits = WrapConfig.checked(max_loras=3, max_lora_rank=32, eviction="priority").tier_limits
    assert dict(limits.slots) == {32: 3}
    assert limits.eviction is Eviction.PRIORITY
    assert limits.max_cpu_loras is limits.max_cpu_lora_bytes is None
    assert WrapConfig.checked(max_loras=0).tier_limits.count == 0


def test_the_audit_shows_who_multiplies_and_lists_few_of_many(llama):
    served = llama.served(quant="fp8-dynamic", max_loras=2)
    report = served.audit()
    (branch,) = report.branches
    taken = {layer for layer in served.registry.layers.values() if layer.branch is not None}
    assert (branch.name, branch.linears) == (_expected_kernel(), len(taken))
    assert f"low-rank products of {len(taken)} linears by kernel" in str(report)
    assert {a.name: a.tier for a in report.adapters} == {
        info.name: info.tier for info in served.adapters.list()
    }
    for number in range(40):
        served.adapters.load(f"more{number}", llama.folders["attn"])
    report = served.audit()
    in_slots = {info.name for info in served.adapters.list() if info.slot is not None}
    assert {a.name for a in report.adapters} == in_slots
    assert report.loaded == 43


def _expected_kernel() -> str:
    return "native" if native.load().available else "eager"
