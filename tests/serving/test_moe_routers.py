"""Adapters on routers: PEFT's `target_parameters` on a weight of two dimensions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import branchline
from branchline.core.errors import AdapterUnsupportedError, BatchError
from tests.models import token_ids
from tests.moe_models import MODELS

IDS = token_ids(2, 7)
PARAMETERS = {
    "mixtral": "mlp.gate.weight",
    "minimax_m2": "mlp.gate.weight",
    "gpt_oss": "mlp.router.weight",
    "deepseek_v3": "mlp.gate.weight",
}
# float32: sums in another order.
NEAR = {"rtol": 0.0, "atol": 2e-5}


def save(model: str, folder: Path, **more):
    """An adapter on the routers of a model, by PEFT, with its PEFT model."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_parameters=[PARAMETERS[model], *more.pop("target_parameters", ())],
        init_lora_weights=False,
        **more,
    )
    adapted = get_peft_model(MODELS[model]().float(), config).eval()
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_router_with_an_adapter_chooses_what_it_does_in_peft(model: str, tmp_path: Path):
    adapted = save(model, tmp_path, target_modules=["o_proj"])
    served = branchline.wrap(MODELS[model]().float(), quant="none", max_loras=2)
    served.adapters.load("routed", tmp_path)
    with torch.no_grad():
        wanted = adapted(IDS).logits
        assert (served(IDS).logits - wanted).abs().max() > 0.1
        for names in (["routed", "routed"], [None, "routed"]):
            got = served(IDS, adapter_names=names).logits
            torch.testing.assert_close(got[1], wanted[1], **NEAR)
    served.adapters.unload("routed")


def test_rows_without_it_keep_their_bytes_and_their_experts(tmp_path: Path):
    save("mixtral", tmp_path, target_parameters=["mlp.experts.down_proj"])
    served = branchline.wrap(MODELS["mixtral"](), quant="fp8-block", max_loras=2)
    base = served(IDS).logits
    served.adapters.load("routed", tmp_path)
    mixed = served(IDS, adapter_names=["routed", None]).logits
    assert torch.equal(mixed[1], base[1])
    assert not torch.equal(mixed[0], base[0])


def test_packed_tokens_go_by_their_own_rows(tmp_path: Path):
    save("mixtral", tmp_path)
    served = branchline.wrap(MODELS["mixtral"](), quant="fp8-block", max_loras=2)
    served.adapters.load("routed", tmp_path)
    router = served.model.model.layers[0].mlp.gate
    hidden = torch.randn(5, 128).bfloat16()
    with served.adapters.rows(["routed", None], tokens=[2, 3]):
        packed = router(hidden)
    alone = router(hidden)
    with served.adapters.rows(["routed"]):
        own = router(hidden[:2])
    for got, first, rest in zip(packed, own, alone, strict=True):
        assert torch.equal(got[:2], first)
        assert torch.equal(got[2:], rest[2:])


def test_an_input_of_other_rows_is_refused(tmp_path: Path):
    save("mixtral", tmp_path)
    served = branchline.wrap(MODELS["mixtral"](), quant="fp8-block", max_loras=2)
    served.adapters.load("routed", tmp_path)
    with served.adapters.rows(["routed", None]), pytest.raises(BatchError, match="router"):
        served.model.model.layers[0].mlp.gate(torch.randn(5, 128).bfloat16())


def test_a_compiled_model_chooses_alike(tmp_path: Path):
    save("mixtral", tmp_path)
    served = branchline.wrap(MODELS["mixtral"](), quant="fp8-block", max_loras=2)
    served.adapters.load("routed", tmp_path)
    with served.adapters.rows(["routed", None]):
        eager = served(IDS).logits
        for layer in served.model.model.layers:
            layer.compile(backend="eager")
        assert torch.equal(served(IDS).logits, eager)


def test_unwrapping_gives_routers_back():
    model = MODELS["mixtral"]()
    served = branchline.wrap(model, quant="fp8-block", max_loras=2)
    assert "forward" in vars(model.model.layers[0].mlp.gate)
    served.unwrap()
    assert "forward" not in vars(model.model.layers[0].mlp.gate)


def test_a_router_named_as_a_module_is_refused_with_what_to_write(tmp_path: Path):
    # As adapters have it that were trained where a router was a linear.
    save("mixtral", tmp_path, target_modules=["o_proj"])
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    changed = {"target_modules": ["o_proj", "gate"], "target_parameters": None}
    file.write_text(json.dumps(config | changed))
    served = branchline.wrap(MODELS["mixtral"]().float(), quant="none", max_loras=2)
    with pytest.raises(AdapterUnsupportedError) as caught:
        served.adapters.load("routed", tmp_path)
    assert "target_modules also selects" in caught.value.reason
    assert "in target_parameters: 'model.layers.0.mlp.gate.weight'" in caught.value.remedy
    # What it says is enough.
    named = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)]
    file.write_text(json.dumps(config | {"target_modules": ["o_proj"], "target_parameters": named}))
    served.adapters.load("routed", tmp_path)
    served.adapters.unload("routed")
