"""Taking adapters, and the plain model, out of a live `PeftModel`."""

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from branchline.adapters.from_peft import (
    plain_modules,
    take_from_peft,
    unwrap_peft,
    weights_from_peft,
)
from branchline.adapters.read import read_adapter
from branchline.core.errors import (
    AdapterCapacityError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    AdapterUnsupportedError,
    WrapError,
)


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64))


def lora(**settings) -> peft.LoraConfig:
    values = {"r": 4, "lora_alpha": 9, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.LoraConfig(**(values | settings))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, before: dict[str, torch.Tensor]):
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
        ("llama", {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}}),
        ("llama", {"target_modules": ["lm_head"]}),
        ("llama", {"target_modules": r".*1\..*proj", "alpha_pattern": {"up_proj": 1.5}}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    ],
)
def test_a_live_adapter_equals_its_saved_folder(kind, settings, tmp_path, facts, tiny_llama):
    model = tiny_llama() if kind == "llama" else tiny_gpt2()
    base = facts(model, model_type=kind)
    wrapped = peft.get_peft_model(model, lora(**settings))
    live = weights_from_peft(wrapped, "default", base, max_rank=16)
    wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
    saved = read_adapter(tmp_path, base, max_rank=16)
    assert live.digest == saved.digest
    assert live.source == "PeftModel adapter 'default'"
    assert dict(live.layers).keys() == dict(saved.layers).keys()
    for name, layer in live.layers.items():
        assert layer.low_rank.scaling == saved.layers[name].low_rank.scaling


@pytest.fixture
def wrapped(tiny_llama) -> peft.PeftModel:
    """A model with the adapters "sql" (rank 4) and "chat" (rank 6)."""
    model = peft.get_peft_model(tiny_llama(), lora(target_modules=["q_proj"]), "sql")
    model.add_adapter("chat", lora(target_modules=["v_proj", "o_proj"], r=6))
    return model


def test_each_of_two_adapters_is_taken_alone(wrapped, base):
    sql = weights_from_peft(wrapped, "sql", base, max_rank=16)
    chat = weights_from_peft(wrapped, "chat", base, max_rank=16)
    assert {name.rpartition(".")[2] for name in sql.layers} == {"q_proj"}
    assert {name.rpartition(".")[2] for name in chat.layers} == {"v_proj", "o_proj"}
    assert (sql.rank, chat.rank) == (4, 6)


def test_what_is_taken_is_a_copy(wrapped, base):
    weights = weights_from_peft(wrapped, "sql", base, max_rank=16)
    layer = weights.layers["model.layers.0.self_attn.q_proj"].low_rank
    live = wrapped.get_base_model().get_submodule("model.layers.0.self_attn.q_proj")
    before = layer.b.clone()
    with torch.no_grad():
        live.lora_B["sql"].weight.add_(1)
    assert torch.equal(layer.b, before)
    assert not layer.b.requires_grad


def test_unwrapping_gives_back_the_base_model_to_the_byte(tiny_llama):
    original = tiny_llama()
    modules, before = dict(original.named_modules()), state(original)
    wrapped = peft.get_peft_model(original, lora(target_modules="all-linear"), "sql")
    wrapped.add_adapter("chat", lora(target_modules=["v_proj"]))
    assert dict(plain_modules(wrapped)) == modules
    plain, names = unwrap_peft(wrapped)
    assert (plain, names) == (original, ["sql", "chat"])
    assert_same_state(plain, before)
    assert dict(plain.named_modules()) == modules
    assert not any(isinstance(module, BaseTunerLayer) for module in plain.modules())


def test_facts_can_be_gathered_before_unwrapping(wrapped, base, facts):
    assert facts(wrapped) == base


def test_the_same_checks_apply(wrapped, base, facts):
    with pytest.raises(AdapterCapacityError, match="max_lora_rank"):
        weights_from_peft(wrapped, "chat", base, max_rank=4)
    with pytest.raises(AdapterNotFoundError, match="'chat', 'sql'"):
        weights_from_peft(wrapped, "none", base, max_rank=16)
    other = facts(tiny_gpt2())
    with pytest.raises(AdapterMismatchError, match="no tensor"):
        weights_from_peft(wrapped, "sql", other, max_rank=16)
    live = wrapped.get_base_model().get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        live.lora_A["sql"].weight[0, 0] = float("nan")
    with pytest.raises(AdapterFormatError, match="NaN"):
        weights_from_peft(wrapped, "sql", base, max_rank=16)


def test_a_scaling_changed_by_hand_is_refused(wrapped, base):
    live = wrapped.get_base_model().get_submodule("model.layers.1.self_attn.q_proj")
    live.set_scale("sql", 0.5)
    with pytest.raises(AdapterUnsupportedError, match=r"layers\.1.*1\.125.*2\.25"):
        weights_from_peft(wrapped, "sql", base, max_rank=16)


def test_weights_on_the_meta_device_are_refused(tiny_llama, base):
    config = lora(target_modules=["q_proj"])
    wrapped = peft.get_peft_model(tiny_llama(), config, low_cpu_mem_usage=True)
    with pytest.raises(AdapterUnsupportedError, match="meta device"):
        weights_from_peft(wrapped, "default", base, max_rank=16)


def test_a_merged_adapter_must_be_unmerged_first(wrapped, base):
    wrapped.merge_adapter(["sql"])
    before = state(wrapped)
    for attempt in (
        lambda: unwrap_peft(wrapped),
        lambda: weights_from_peft(wrapped, "sql", base, max_rank=16),
    ):
        with pytest.raises(WrapError, match=r"call unmerge_adapter\(\) first"):
            attempt()
    assert_same_state(wrapped, before)
    wrapped.unmerge_adapter()
    assert weights_from_peft(wrapped, "sql", base, max_rank=16).layers
    assert unwrap_peft(wrapped)[1] == ["sql", "chat"]


REFUSED = [
    (lora(target_modules=["q_proj"], init_lora_weights="pissa"), "pissa"),
    (lora(target_modules=["q_proj"], kasa_config=peft.KasaConfig()), "KaSA"),
    (lora(target_modules=["q_proj"], bias="all"), "bias"),
    (peft.HRAConfig(target_modules=["q_proj"]), "HRA"),
    (peft.ShiraConfig(target_modules=["q_proj"], r=2), "SHIRA"),
    (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING"),
    (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING"),
]


@pytest.mark.parametrize(("config", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_is_not_served_is_refused_by_name_and_left_alone(config, word, tiny_llama, base):
    wrapped = peft.get_peft_model(tiny_llama(), config)
    before = state(wrapped)
    for attempt in (
        lambda: unwrap_peft(wrapped),
        lambda: weights_from_peft(wrapped, "default", base, max_rank=16),
    ):
        with pytest.raises(AdapterUnsupportedError, match=word):
            attempt()
    assert_same_state(wrapped, before)


def test_dora_is_taken_first_and_lowered_with_the_weights_that_are_served(
    tiny_llama, base, base_weights
):
    wrapped = peft.get_peft_model(tiny_llama(), lora(target_modules=["q_proj"], use_dora=True))
    taken = take_from_peft(wrapped, "default", base, max_rank=16)
    unwrap_peft(wrapped)
    with pytest.raises(AdapterUnsupportedError, match=r"DoRA.*weights of the base model"):
        taken.lower()
    weights = taken.lower(base_weights(tiny_llama()))
    assert all(parts.gain is not None for parts in weights.layers.values())


def test_what_is_no_peft_model_is_refused(tiny_llama, base):
    model = tiny_llama()
    for attempt in (
        lambda: unwrap_peft(model),
        lambda: weights_from_peft(model, "default", base, max_rank=16),
        lambda: list(plain_modules(model)),
    ):
        with pytest.raises(WrapError, match=r"LlamaForCausalLM: is no peft\.PeftModel"):
            attempt()
