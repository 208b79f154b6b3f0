"""Lowered adapters of every type, in the slots of one linear and in one batch, against PEFT."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

from branchline.adapters.lowering import (
    adalora,
    beft,
    boft,
    c3a,
    delora,
    fourierft,
    hira,
    ia3,
    loha,
    lokr,
    lora,
    miss,
    oft,
    road,
    vera,
)
from tests.adapters.lowering.peft_linear import Adapted
from tests.adapters.test_branch_parts import SLOTS, K, Linear, N, inputs

VERA = vera.regenerate(0, 4, K, N)
TYPES = {
    "lora": (peft.LoraConfig(r=3, lora_alpha=5), lora, lora.LoraSettings(3, 5)),
    "dora": (
        peft.LoraConfig(r=4, use_dora=True),
        lora,
        lora.LoraSettings(4, 8, use_dora=True),
    ),
    "lora_bias": (
        peft.LoraConfig(r=2, lora_bias=True),
        lora,
        lora.LoraSettings(2, 8, lora_bias=True),
    ),
    "adalora": (
        peft.AdaLoraConfig(init_r=3, total_step=9),
        adalora,
        adalora.AdaLoraSettings(3, 3, 8),
    ),
    "ia3": (
        peft.IA3Config(target_modules=["proj"], feedforward_modules=[]),
        ia3,
        ia3.Ia3Settings(False),
    ),
    "ia3-feedforward": (
        peft.IA3Config(target_modules=["proj"], feedforward_modules=["proj"]),
        ia3,
        ia3.Ia3Settings(True),
    ),
    "vera": (peft.VeraConfig(r=4), vera, vera.VeraSettings(4, VERA)),
    "loha": (peft.LoHaConfig(r=2), loha, loha.LoHaSettings(2, 8)),
    "lokr": (peft.LoKrConfig(r=8), lokr, lokr.LoKrSettings(8, 8)),
    "oft": (peft.OFTConfig(oft_block_size=4, r=0), oft, oft.OftSettings(0, 4)),
    "boft": (peft.BOFTConfig(boft_block_size=4), boft, boft.BoftSettings(4)),
    "fourierft": (
        peft.FourierFTConfig(n_frequency=9),
        fourierft,
        fourierft.FourierFTSettings(9, 150.0, 777),
    ),
    "c3a": (peft.C3AConfig(block_size=2), c3a, c3a.C3aSettings(2)),
    "hira": (peft.HiraConfig(r=2), hira, hira.HiraSettings(2)),
    "miss": (peft.MissConfig(r=4), miss, miss.MissSettings(4)),
    "road": (peft.RoadConfig(group_size=10), road, road.RoadSettings("road_1", 10)),
    "beft": (peft.BeftConfig(target_modules=["proj"]), beft, beft.BeftSettings()),
    "delora": (peft.DeloraConfig(r=3), delora, delora.DeloraSettings(3)),
}
NAMES = list(TYPES)
# As many in a batch as the linear has slots.
GROUPS = [NAMES[start : start + len(SLOTS)] for start in range(0, len(NAMES), len(SLOTS))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", GROUPS, ids="-".join)
def test_each_row_gets_what_peft_gives_it(names):
    bare = Linear([], torch.float32)
    made = {}
    for name in names:
        config, module, settings = TYPES[name]
        adapted = Adapted(copy.deepcopy(config), copy.deepcopy(bare.module))
        made[name] = adapted, module.lower(adapted.tensors, settings, adapted.base())
    linear = Linear([weights for _, weights in made.values()], torch.float32)
    chosen = [*range(len(names)), -1]
    x = inputs(len(chosen), torch.float32)
    with torch.no_grad():
        got = linear.run(x, chosen)
        assert torch.equal(got[-1], linear.module(x)[-1])
        for row, (adapted, _) in enumerate(made.values()):
            expected = adapted.model(x[row : row + 1])[0]
            size = float(expected.abs().max().clamp(min=1))
            torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-5 * size)
            assert (expected - linear.module(x[row])).abs().max() > 1e-3
