"""Experts that are split over two ranks on the CPU, by transformers' own expert-parallel plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from branchline.core.errors import WrapError
from tests.models import token_ids
from tests.moe.models import MODELS
from tests.serving import two_ranks
from tests.serving.two_ranks import Setup, TwoRanks

IDS = token_ids(3, 7)
# float32, no quantisation: sums in another order.
EXACT = {"rtol": 0.0, "atol": 2e-5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("moe")
    for name in ("mixtral", "qwen3_moe"):
        MODELS[name]().save_pretrained(root / name)
    return {name: root / name for name in ("mixtral", "qwen3_moe")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    processes = TwoRanks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()


def setup(folder: Path, quant: str, dtype: torch.dtype = torch.bfloat16) -> Setup:
    settings = {"quant": quant, "max_loras": 0}
    return Setup(folder, dtype, settings=settings, expert_parallel=True)


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_two_ranks_give_what_one_gives(folders, ranks: TwoRanks, model: str):
    split = setup(folders[model], "none", torch.float32)
    alone = two_ranks.wrapped(split)
    ranks.run(two_ranks.serve, split)
    both = ranks.run(two_ranks.logits, IDS, None)
    assert torch.equal(*both)
    torch.testing.assert_close(both[0], alone(IDS).logits, **EXACT)


@pytest.mark.parametrize("tokens", [1, 9, 0])
def test_quantised_experts_give_what_those_of_one_rank_give(folders, ranks: TwoRanks, tokens: int):
    split = setup(folders["mixtral"], "fp8-block")
    alone = two_ranks.wrapped(split)
    ranks.run(two_ranks.serve, split)
    torch.manual_seed(0)
    given = (
        torch.randn(tokens, 128).bfloat16(),
        torch.stack([torch.randperm(4)[:2] for _ in range(tokens)] or [torch.zeros(2).long()])[
            :tokens
        ],
        torch.rand(tokens, 2),
    )
    both = ranks.run(two_ranks.through_experts, *given)
    assert torch.equal(*both)
    # Sums of two float32 numbers, in whichever order, and one rounding.
    assert torch.equal(both[0], two_ranks.through_experts_of(alone, *given))


def test_adapters_on_split_experts_and_on_routers(folders, ranks: TwoRanks, tmp_path: Path):
    torch.manual_seed(3)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_parameters=["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"],
        init_lora_weights=False,
    )
    get_peft_model(MODELS["mixtral"](), config).save_pretrained(tmp_path)
    split = replace(
        setup(folders["mixtral"], "none", torch.float32),
        settings={"quant": "none", "max_loras": 1},
        adapters={"expert": tmp_path},
    )
    names = ["expert", None, "expert"]
    alone = two_ranks.wrapped(split)
    ranks.run(two_ranks.serve, split)
    both = ranks.run(two_ranks.logits, IDS, names)
    assert torch.equal(*both)
    wanted = alone(IDS, adapter_names=names).logits
    assert (alone(IDS).logits[0] - wanted[0]).abs().max() > 0.1
    torch.testing.assert_close(both[0], wanted, **EXACT)


def test_each_rank_has_half_of_the_experts(folders, ranks: TwoRanks):
    ranks.run(two_ranks.serve, setup(folders["mixtral"], "fp8-block"))
    found = ranks.run(two_ranks.shapes_of_experts)
    for shapes in found:
        assert shapes
        assert {shape[0] for shape in shapes.values()} == {2}


def test_experts_over_other_ranks_than_the_rest_are_refused(folders, ranks: TwoRanks):
    refusals = ranks.run(two_ranks.wrap_with_lying_config, setup(folders["mixtral"], "none"))
    for refusal in refusals:
        assert isinstance(refusal, WrapError)
        assert "expert-parallel over 4 ranks" in str(refusal)
