"""Adapters on routers: PEFT's `target_parameters` on a weight of two dimensions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import branchline
from branchline.core.errors import AdapterUnsupportedError, BatchError
from branchline.linear.router import RouterOutputs, _outputs_of
from tests.models import token_ids
from tests.moe.models import MODELS

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
    shape = more.pop("shape", {})
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_parameters=[PARAMETERS[model], *more.pop("target_parameters", ())],
        init_lora_weights=False,
        **more,
    )
    adapted = get_peft_model(MODELS[model](**shape).float(), config).eval()
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
    with served.adapters.rows(["routed"], tokens=[2]):
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


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SMALL = {"num_hidden_layers": 1}


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("model", PARAMETERS)
def test_routers_and_experts_are_in_one_graph_whatever_is_live(model: str, tmp_path: Path):
    shape = SMALL | ({"first_k_dense_replace": 0} if model == "deepseek_v3" else {})
    save(model, tmp_path, shape=shape)
    served = branchline.wrap(MODELS[model](**shape), quant="fp8-block", max_loras=2)
    served.adapters.load("routed", tmp_path)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(served.model, fullgraph=True, dynamic=True, backend=counter)
    base, frames = None, None
    for names in ([None, None], ["routed", None], [None, "routed"], ["routed", "routed"]):
        with served.adapters.rows(names), torch.no_grad():
            wanted, found = (run(input_ids=IDS).logits for run in (served.model, compiled))
        assert torch.equal(found, wanted)
        base = wanted if base is None else base
        # An adapter on the router alone: else all that is shown is that nothing happens.
        assert [torch.equal(*rows) for rows in zip(wanted, base, strict=True)] == [
            name is None for name in names
        ]
        frames = frames or counter.frame_count
    served.adapters.unload("routed")
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=IDS).logits, base)
    assert counter.frame_count == frames


def test_a_router_in_a_graph_passes_opcheck():
    served = branchline.wrap(MODELS["mixtral"](), quant="fp8-block", max_loras=2)
    place = vars(served.model.model.layers[0].mlp.gate)["forward"]
    for shape in ((5, 128), (2, 3, 128)):
        x = torch.randn(shape).bfloat16()
        torch.library.opcheck(torch.ops.branchline.routed_router.default, (x, [], place.handle))


class _Odd(nn.Module):
    """A router whose results a graph cannot be told of, or that shares their memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))
        self.kind = kind

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None):
        scores = nn.functional.linear(x, self.weight)
        if self.kind == "alone":
            return scores
        if self.kind == "dict":
            return {"scores": scores}
        if self.kind == "counts":
            return scores, torch.zeros(x.shape[0] + 1)
        if self.kind == "raises":
            raise ValueError("no zeros")
        return scores, scores.view(-1), x


def test_what_a_graph_is_told_of_a_router():
    def rule(kind: str, dims: int = 2):
        return _outputs_of(_Odd(kind), dims)

    assert rule("alone") == RouterOutputs((((0,), 4),), (torch.float32,), True)
    assert rule("alone", 3).sizes == (((0,), (1,), 4),)
    for kind in ("dict", "counts", "raises"):
        assert rule(kind) is None
    # Nothing that is a multiple of the rows is taken for it.
    assert rule("views") is None
    module = _Odd("alone")
    (room,) = _outputs_of(module, 3).room(torch.zeros(6, 9, 16))
    assert room.shape == module(torch.zeros(6, 9, 16)).shape


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
