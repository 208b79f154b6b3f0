"""Rows that take several adapters at once, against the sum that PEFT makes of them."""

from __future__ import annotations

import math

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model

from branchline.adapters import Mixture
from branchline.core.errors import AdapterUnsupportedError, BatchError
from branchline.core.route import Route
from tests.models import token_ids

IDS = token_ids(4, 7)
HALVES = {"attn": 0.75, "all": -0.5}


def peft_sum(llama, weights: dict[str, float]) -> torch.Tensor:
    model = llama.plain(torch.float32)
    names = list(llama.folders)
    model = PeftModel.from_pretrained(model, llama.folders[names[0]], adapter_name=names[0]).eval()
    for name in names[1:]:
        model.load_adapter(llama.folders[name], adapter_name=name)
    model.add_weighted_adapter(list(weights), list(weights.values()), "sum", combination_type="cat")
    model.set_adapter("sum")
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    # Not an rsLoRA adapter first: PEFT would scale the sum as one.
    "weights",
    [HALVES, {"attn": 1.5}, {"attn": 0.2, "mlp": 0.3, "all": 0.9}],
    ids=str,
)
def test_a_mixture_is_what_peft_adds_up(llama, weights):
    served = llama.served(torch.float32, quant="none")
    expected = peft_sum(llama, weights)
    alone = served(IDS, adapter_names=[weights] * 4).logits
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("policy", ["static", "dynamic", "dual", "absorbed"])
def test_mixtures_beside_other_rows(llama, policy):
    served = llama.served(quant="fp8-dynamic", policy=policy)
    names = [HALVES, None, "attn", Mixture.of({"mlp": 2.0})]
    together = served(IDS, adapter_names=names).logits
    for row, name in enumerate(names):
        alone = served(IDS, adapter_names=[name] * 4).logits
        assert torch.equal(together[row], alone[row])
    assert torch.equal(together[1], served(IDS).logits[1])
    plain = served(IDS, adapter_names=["mlp"] * 4).logits
    assert not torch.equal(together[3], plain[3])


def test_a_weight_of_one_is_the_adapter_itself(llama):
    served = llama.served(torch.float32, quant="none")
    one = served(IDS, adapter_names=[{"attn": 1.0}] * 4).logits
    torch.testing.assert_close(one, served(IDS, adapter_names=["attn"] * 4).logits)


def test_sites_that_no_adapter_of_a_mixture_reads_stay_fused(llama):
    served = llama.served(quant="fp8-dynamic", policy="dual")
    with served.adapters.rows([{"attn": 0.5}] * 4) as batch:
        routes = {site.site: site.route for site in batch.plan.sites}
    assert Route.DUAL not in routes.values()
    assert routes["model.layers.0.input_layernorm"] == Route.UNFUSED
    assert routes["model.layers.0.post_attention_layernorm"] == Route.FUSED


def test_generation_takes_mixtures(llama):
    served = llama.served(torch.float32, quant="none")
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    named = served.generate(IDS[:2], adapter_names=[{"all": 1.0}, None], **settings)
    single = served.generate(IDS[:2], adapter_names=["all", None], **settings)
    assert torch.equal(named, single)


@pytest.mark.parametrize(
    "mixture", [{}, {"attn": math.nan}, {"attn": "much"}, {"attn": True}, {3: 1.0}], ids=str
)
def test_what_is_no_mixture_is_refused(llama, mixture):
    served = llama.served(torch.float32, quant="none")
    with pytest.raises(BatchError, match="mixture"):
        served(IDS, adapter_names=[mixture] * 4)
    assert all(info.batches == 0 for info in served.adapters.list())


def test_other_parts_than_products_are_refused_by_name(llama, tmp_path):
    config = IA3Config(
        target_modules=["k_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"
    )
    get_peft_model(llama.plain(torch.float32), config).save_pretrained(tmp_path)
    served = llama.served(torch.float32, quant="none")
    served.adapters.load("scales", tmp_path)
    with pytest.raises(AdapterUnsupportedError, match="'scales': is more than low-rank"):
        served(IDS, adapter_names=[{"attn": 0.5, "scales": 0.5}] * 4)
    assert all(info.batches == 0 for info in served.adapters.list())
