"""What PEFT itself saves reads back with exactly its own scalings, or is refused by name."""

import json

import peft
import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import save_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from branchline.adapters.read import read_adapter
from branchline.core.errors import AdapterUnsupportedError


def tiny_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64))


VARIANTS = {
    "list": {"target_modules": ["q_proj", "v_proj"]},
    "regex": {"target_modules": r".*layers\.1\..*(q|v)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "default-targets": {},
    "rank-pattern": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
    },
    "anchored-pattern": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 3},
        "alpha_pattern": {"model.layers.1.self_attn.v_proj": 5},
    },
    "alpha-pattern": {
        "target_modules": ["q_proj", "v_proj"],
        "alpha_pattern": {"self_attn.q_proj": 3, "v_proj": 0.5},
        "lora_alpha": 7,
    },
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True, "r": 6, "lora_alpha": 11},
    "rslora-patterns": {
        "target_modules": ["q_proj", "o_proj"],
        "use_rslora": True,
        "rank_pattern": {"o_proj": 3},
        "alpha_pattern": {"q_proj": 13},
    },
    "exclude-list": {"target_modules": "all-linear", "exclude_modules": ["down_proj", "q_proj"]},
    "exclude-regex": {
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": r"model\.layers\.0\..*",
    },
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "one-layer-pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "no-task": {"target_modules": ["q_proj"], "task_type": None},
}
GPT2_VARIANTS = {
    "list": {"target_modules": ["c_attn"]},
    "fan-in-fan-out": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "all-linear": {"target_modules": "all-linear"},
    "default-targets": {},
    "layers": {
        "target_modules": ["c_fc"],
        "layers_to_transform": [1],
        "layers_pattern": ["h"],
        "use_rslora": True,
    },
}


def peft_model(model: nn.Module, settings: dict) -> peft.PeftModel:
    values = {"r": 4, "lora_alpha": 9, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**(values | settings)))


def assert_as_in_peft(weights, model: peft.PeftModel):
    live = {
        name: module
        for name, module in model.get_base_model().named_modules()
        if isinstance(module, LoraLayer)
    }
    assert set(weights.layers) == set(live)
    for name, parts in weights.layers.items():
        layer = parts.low_rank
        assert layer.scaling == live[name].scaling["default"]
        assert torch.equal(layer.a, live[name].lora_A["default"].weight)
        assert torch.equal(layer.b, live[name].lora_B["default"].weight)
    assert weights.parameters == sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".lora_" in name
    )
    assert weights.nbytes == 4 * weights.parameters


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_a_saved_llama_adapter_reads_back(settings, tmp_path, tiny_llama, base):
    model = peft_model(tiny_llama(), settings)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert_as_in_peft(read_adapter(tmp_path, base, max_rank=16), model)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@pytest.mark.parametrize("settings", GPT2_VARIANTS.values(), ids=GPT2_VARIANTS)
def test_a_saved_gpt2_adapter_reads_back(settings, tmp_path, facts):
    plain_model = tiny_gpt2()
    base = facts(plain_model, model_type="gpt2")
    model = peft_model(plain_model, settings)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert_as_in_peft(read_adapter(tmp_path, base, max_rank=16), model)


def test_layers_sum_up_to_what_peft_computes(tmp_path, tiny_llama, base):
    model = peft_model(tiny_llama(), {"target_modules": ["q_proj"], "use_rslora": True})
    model.save_pretrained(tmp_path)
    weights = read_adapter(tmp_path, base, max_rank=16)
    name = "model.layers.1.self_attn.q_proj"
    layer, live = weights.layers[name].low_rank, model.get_base_model().get_submodule(name)
    x = torch.randn(5, 64)
    branch = (x @ layer.a.T) @ layer.b.T * layer.scaling
    with torch.no_grad():
        torch.testing.assert_close(live(x), live.base_layer(x) + branch)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "pissa"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "olora"),
        ({"target_modules": ["q_proj"], "kasa_config": peft.KasaConfig()}, "KaSA"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_peft_saves_with_more_than_lora_is_refused_by_name(
    settings, word, tmp_path, tiny_llama, base
):
    peft_model(tiny_llama(), settings).save_pretrained(tmp_path)
    with pytest.raises(AdapterUnsupportedError, match=word) as caught:
        read_adapter(tmp_path, base, max_rank=16)
    # What the config already explains is not reported a second time.
    assert "although" not in str(caught.value)


def test_the_head_of_a_classifier_is_left_out_of_all_linear(tmp_path, facts):
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**settings, num_attention_heads=2, vocab_size=64, pad_token_id=0)
    plain_model = LlamaForSequenceClassification(config)
    base = facts(plain_model, task="SEQ_CLS", output_embedding=None)
    lora = peft.LoraConfig(target_modules="all-linear", r=4, task_type="SEQ_CLS")
    model = peft.inject_adapter_in_model(lora, plain_model)
    tensors = {
        f"base_model.model.{name}": value.contiguous()
        for name, value in peft.get_peft_model_state_dict(model).items()
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "task_type": "SEQ_CLS"}
    raw["target_modules"] = "all-linear"
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
    weights = read_adapter(tmp_path, base, max_rank=16)
    assert "score" not in weights.layers
    assert len(weights.layers) == 14
