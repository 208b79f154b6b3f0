"""What an adapter holds beside its type's tensors: whole modules, rows of tokens, copies."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from branchline.adapters.from_peft import unwrap_peft, weights_from_peft
from branchline.adapters.identity import BaseIdentity
from branchline.adapters.read import read_adapter
from branchline.core.errors import (
    AdapterCapacityError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterUnsupportedError,
)
from branchline.serving.base_facts import base_facts
from tests.helpers import edit_adapter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
HEAD, TABLE = "lm_head", "model.embed_tokens"


def lora(**settings) -> peft.LoraConfig:
    values = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**(values | settings))


def trained(model, config, folder: Path) -> peft.PeftModel:
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(11)
    for value in wrapped.parameters():
        if value.requires_grad:
            value.copy_(value + torch.randn(value.shape, generator=generator) * 0.1)
    wrapped.save_pretrained(folder)
    return wrapped


def test_modules_saved_whole_replace_weights_of_linears_embeddings_and_norms(
    tmp_path, tiny_llama, base
):
    config = lora(modules_to_save=["lm_head", "embed_tokens", "model.norm", "layers.1.mlp"])
    model = trained(tiny_llama(), config, tmp_path)
    weights = read_adapter(tmp_path, base, max_rank=16)
    live = dict(model.get_base_model().named_modules())

    def saved(path: str, inner: str = "") -> torch.nn.Module:
        return live[f"{path}.modules_to_save.default{inner}"]

    assert torch.equal(weights.layers[HEAD].weight, saved(HEAD).weight)
    assert torch.equal(weights.embeddings[TABLE].weight, saved(TABLE).weight)
    assert torch.equal(weights.norms["model.norm"].weight, saved("model.norm").weight)
    inside = {name for name in weights.layers if name.startswith("model.layers.1.mlp.")}
    assert {name.rpartition(".")[2] for name in inside} == {"gate_proj", "up_proj", "down_proj"}
    for name in inside:
        expected = saved("model.layers.1.mlp", name.removeprefix("model.layers.1.mlp")).weight
        assert torch.equal(weights.layers[name].weight, expected)
    assert weights.layers["model.layers.0.self_attn.q_proj"].low_rank is not None


def test_the_head_of_a_classifier_is_saved_with_its_bias(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = BertForSequenceClassification(
        BertConfig(**sizes, num_attention_heads=2, vocab_size=64, num_labels=3)
    )
    base = base_facts(model)
    config = peft.LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS")
    wrapped = trained(model, config, tmp_path)
    weights = read_adapter(tmp_path, base, max_rank=16)
    live = wrapped.get_base_model().classifier.modules_to_save["default"]
    assert torch.equal(weights.layers["classifier"].weight, live.weight)
    assert torch.equal(weights.layers["classifier"].shift, live.bias)
    digest = weights_from_peft(wrapped, "default", base, max_rank=16).digest
    assert digest == weights.digest


def test_a_saved_conv1d_is_turned_to_outputs_by_inputs(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    base = base_facts(model)
    config = lora(target_modules=["c_attn"], modules_to_save=["c_fc", "ln_f"])
    live = trained(model, config, tmp_path).get_base_model()
    weights = read_adapter(tmp_path, base, max_rank=16)
    saved = live.transformer.h[0].mlp.c_fc.modules_to_save["default"]
    assert torch.equal(weights.layers["transformer.h.0.mlp.c_fc"].weight, saved.weight.T)
    norm = live.transformer.ln_f.modules_to_save["default"]
    assert torch.equal(weights.norms["transformer.ln_f"].bias, norm.bias)


@pytest.mark.parametrize(
    ("changes", "config", "error", "words"),
    [
        ({"lm_head.weight": None}, {}, AdapterMismatchError, ["lm_head", "no weight"]),
        ({"lm_head.weight": torch.ones(9, 64)}, {}, AdapterMismatchError, ["[9, 64]", "256"]),
        ({"lm_head.bias": torch.ones(256)}, {}, AdapterMismatchError, ["has no bias"]),
        ({}, {"modules_to_save": None}, AdapterUnsupportedError, ["lm_head", "modules_to_save"]),
        ({}, {"modules_to_save": ["lm_head", "act_fn"]}, AdapterUnsupportedError, ["act_fn"]),
        ({}, {"modules_to_save": ["("]}, AdapterFormatError, ["modules_to_save", "expression"]),
        ({"lm_head.weight": torch.ones(256, 64).to(torch.float8_e5m2)}, {},
         AdapterUnsupportedError, ["float8", "lm_head"]),
    ],
)  # fmt: skip
def test_a_fault_of_a_saved_module_is_named(
    changes, config, error, words, tmp_path, tiny_llama, base
):
    trained(tiny_llama(), lora(modules_to_save=["lm_head"]), tmp_path)
    edit_adapter(
        tmp_path, {f"base_model.model.{key}": value for key, value in changes.items()}, **config
    )
    with pytest.raises(error) as caught:
        read_adapter(tmp_path, base, max_rank=16)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_name_that_the_model_has_not_is_noted(tmp_path, tiny_llama, base):
    trained(tiny_llama(), lora(modules_to_save=["lm_head"]), tmp_path)
    edit_adapter(tmp_path, modules_to_save=["lm_head", "score"])
    notes = read_adapter(tmp_path, base, max_rank=16).notes
    assert any("'score'" in note for note in notes)


def test_a_saved_module_that_takes_no_adapter_is_refused_with_the_reason(
    tmp_path, tiny_llama, facts
):
    trained(tiny_llama(), lora(modules_to_save=["embed_tokens"]), tmp_path)
    base = facts(tiny_llama(), {TABLE: "it is computed elsewhere"})
    with pytest.raises(AdapterUnsupportedError, match=f"{TABLE}.*computed elsewhere"):
        read_adapter(tmp_path, base, max_rank=16)


# --- rows of tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own_type", [False, True])
def test_trained_tokens_replace_rows_and_those_of_a_tied_head(
    tied, own_type, tmp_path, tiny_llama, facts
):
    model = tiny_llama(tie_word_embeddings=tied)
    base = facts(model)
    ids = [7, 2, 9]
    config = (
        peft.TrainableTokensConfig(token_indices=ids)
        if own_type
        else lora(trainable_token_indices=ids)
    )
    wrapped = trained(model, config, tmp_path)
    weights = read_adapter(tmp_path, base, max_rank=16)
    live = wrapped.get_base_model().model.embed_tokens
    layer = live if own_type else live.token_adapter
    rows = layer.trainable_tokens_delta["default"]
    table = weights.embeddings[TABLE]
    assert table.token_ids.tolist() == [2, 7, 9]
    assert torch.equal(table.tokens, rows[[1, 0, 2]])
    assert (HEAD in weights.layers) is tied
    if tied:
        parts, x = weights.layers[HEAD], torch.randn(3, 64)
        product = x @ parts.low_rank.a.T @ parts.low_rank.b.T
        torch.testing.assert_close(product[:, ids], x @ rows.T)
        assert parts.gain.nonzero().flatten().tolist() == [n for n in range(256) if n not in ids]
    assert weights_from_peft(wrapped, "default", base, max_rank=16).digest == weights.digest
    plain, _ = unwrap_peft(wrapped)
    assert facts(plain) == base


@pytest.mark.parametrize(
    ("ids", "changes", "error", "words"),
    [
        ([1, 2, 300], {}, AdapterMismatchError, ["300", "256"]),
        ([1, 2, 2], {}, AdapterFormatError, ["twice"]),
        ([1, 2], {}, AdapterMismatchError, ["[3, 64]", "[2, 64]"]),
        (None, {}, AdapterUnsupportedError, ["trainable_token_indices"]),
        ([1, 2, 3], {"token_adapter.trainable_tokens_delta": None}, AdapterMismatchError,
         ["no rows", TABLE]),
        ({"foo": [1, 2, 3]}, {}, AdapterMismatchError, ["foo"]),
    ],
)  # fmt: skip
def test_a_fault_of_trained_tokens_is_named(ids, changes, error, words, tmp_path, tiny_llama, base):
    trained(tiny_llama(), lora(trainable_token_indices=[1, 2, 3]), tmp_path)
    tensors = {f"base_model.model.{TABLE}.{key}": value for key, value in changes.items()}
    edit_adapter(tmp_path, tensors, trainable_token_indices=ids)
    with pytest.raises(error) as caught:
        read_adapter(tmp_path, base, max_rank=16)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_more_tokens_of_a_tied_head_than_ranks_are_refused(tmp_path, tiny_llama, facts):
    model = tiny_llama(tie_word_embeddings=True)
    base = facts(model)
    trained(model, lora(trainable_token_indices=list(range(20))), tmp_path)
    with pytest.raises(AdapterCapacityError, match="rank 20"):
        read_adapter(tmp_path, base, max_rank=16)
    assert read_adapter(tmp_path, base, max_rank=20).rank == 20


# --- embeddings, heads and copies -------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_lora_on_an_embedding_and_on_a_head(tied, tmp_path, tiny_llama, facts, base_weights):
    model = tiny_llama(tie_word_embeddings=tied)
    base, own = facts(model), base_weights(tiny_llama(tie_word_embeddings=tied))
    config = lora(target_modules=["embed_tokens", "lm_head"])
    wrapped = trained(model, config, tmp_path)
    weights = read_adapter(tmp_path, base, max_rank=16, base_weights=own)
    live = wrapped.get_base_model().model.embed_tokens
    table = weights.embeddings[TABLE]
    assert torch.equal(table.low_rank.a, live.lora_embedding_A["default"])
    assert torch.equal(table.low_rank.b, live.lora_embedding_B["default"])
    # The copies that PEFT makes are the base's own: nothing is kept of them.
    assert table.weight is None
    assert weights.layers[HEAD].weight is None
    assert any("the base's own" in note for note in weights.notes)
    taken = weights_from_peft(wrapped, "default", base, max_rank=16, base_weights=own)
    assert taken.digest == weights.digest


@pytest.mark.parametrize("known", [False, True])
def test_a_copy_that_is_not_the_bases_is_served_in_its_place(
    known, tmp_path, tiny_llama, base, base_weights
):
    trained(tiny_llama(), lora(target_modules=["embed_tokens", "lm_head"]), tmp_path)
    other = torch.randn(256, 64)
    copies = {f"base_model.model.{name}.base_layer.weight": other for name in (TABLE, HEAD)}
    edit_adapter(tmp_path, {key: value.clone() for key, value in copies.items()})
    own = base_weights(tiny_llama()) if known else None
    weights = read_adapter(tmp_path, base, max_rank=16, base_weights=own)
    assert torch.equal(weights.embeddings[TABLE].weight, other)
    assert torch.equal(weights.layers[HEAD].weight, other)
    assert weights.layers[HEAD].low_rank is not None


def test_dora_on_an_embedding_is_refused_by_name(tmp_path, tiny_llama, base, base_weights):
    trained(tiny_llama(), lora(target_modules=["embed_tokens"], use_dora=True), tmp_path)
    own = base_weights(tiny_llama())
    with pytest.raises(AdapterFormatError, match="lora_magnitude_vector"):
        read_adapter(tmp_path, base, max_rank=16, base_weights=own)


def test_norms_of_ln_tuning(tmp_path, tiny_llama, base):
    config = peft.LNTuningConfig(target_modules=["input_layernorm", "model.norm"])
    wrapped = trained(tiny_llama(), config, tmp_path)
    weights = read_adapter(tmp_path, base, max_rank=16)
    assert set(weights.norms) == {
        "model.layers.0.input_layernorm",
        "model.layers.1.input_layernorm",
        "model.norm",
    }
    live = wrapped.get_base_model().model.norm.ln_tuning_layers["default"]
    assert torch.equal(weights.norms["model.norm"].weight, live.weight)
    assert not weights.layers
    assert weights_from_peft(wrapped, "default", base, max_rank=16).digest == weights.digest


def test_another_base_model_is_noted_by_its_name(tmp_path, tiny_llama, facts):
    trained(tiny_llama(), lora(), tmp_path)
    edit_adapter(tmp_path, base_model_name_or_path="acme/Tiny")

    def notes(name: str) -> tuple[str, ...]:
        known = facts(tiny_llama(), identity=BaseIdentity(name))
        return read_adapter(tmp_path, known, max_rank=16).notes

    assert notes("") == notes("/models/tiny") == ()
    assert any("acme/Tiny" in note and "large" in note for note in notes("/models/large"))
