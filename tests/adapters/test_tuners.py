"""Every PEFT type that is served: what PEFT itself saves reads back and computes the same."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from branchline.adapters.from_peft import unwrap_peft, weights_from_peft
from branchline.adapters.lowering.base import Effect
from branchline.adapters.read import read_adapter, read_plan
from branchline.adapters.tuners import TUNERS, UNSERVED
from branchline.core.errors import AdapterError, AdapterFormatError, AdapterUnsupportedError
from tests.helpers import edit_adapter
from tests.parts_reference import apply_parts, effect_of

TWO = {"target_modules": ["q_proj", "down_proj"]}

CONFIGS: Mapping[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=4, **TWO),
    "lora-bias": peft.LoraConfig(r=4, lora_bias=True, **TWO),
    "dora": peft.LoraConfig(r=4, use_dora=True, rank_pattern={"q_proj": 2}, **TWO),
    "bdlora-a": peft.LoraConfig(
        r=4,
        use_bdlora=peft.BdLoraConfig(
            target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2
        ),
        **TWO,
    ),
    "adalora": peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, lora_alpha=3, **TWO),
    "adalora-kept": peft.AdaLoraConfig(
        init_r=4,
        target_r=2,
        total_step=10,
        rank_pattern={
            f"model.layers.{layer}.{name}.lora_E": [True, layer == 1, False, True]
            for layer in (0, 1)
            for name in ("self_attn.q_proj", "mlp.down_proj")
        },
        **TWO,
    ),
    "ia3": peft.IA3Config(feedforward_modules=["down_proj"], **TWO),
    "ia3-regex": peft.IA3Config(
        target_modules=r".*(q|down)_proj", feedforward_modules=r".*down_proj"
    ),
    "ia3-defaults": peft.IA3Config(),
    "vera": peft.VeraConfig(r=8, **TWO),
    "vera-drawn": peft.VeraConfig(r=8, save_projection=False, projection_prng_key=5, **TWO),
    "loha": peft.LoHaConfig(r=2, alpha=3, **TWO),
    "loha-patterns": peft.LoHaConfig(
        r=2, alpha=3, rank_pattern={"q_proj": 3}, alpha_pattern={"down_proj": 1}, **TWO
    ),
    "lokr": peft.LoKrConfig(r=2, alpha=3, **TWO),
    "lokr-both": peft.LoKrConfig(r=2, alpha=3, decompose_both=True, decompose_factor=8, **TWO),
    "oft": peft.OFTConfig(oft_block_size=16, **TWO),
    "oft-exact": peft.OFTConfig(oft_block_size=16, use_cayley_neumann=False, **TWO),
    "boft": peft.BOFTConfig(boft_block_size=4, **TWO),
    "fourierft": peft.FourierFTConfig(n_frequency=20, n_frequency_pattern={"down_proj": 12}, **TWO),
    "c3a": peft.C3AConfig(block_size=16, block_size_pattern={"q_proj": 32}, **TWO),
    "hira": peft.HiraConfig(r=4, rank_pattern={"q_proj": 3}, **TWO),
    "miss": peft.MissConfig(r=8, **TWO),
    "miss-mini": peft.MissConfig(r=8, mini_r=4, init_weights="mini", **TWO),
    "delora": peft.DeloraConfig(r=4, rank_pattern={"q_proj": 3}, **TWO),
    "road": peft.RoadConfig(variant="road_1", group_size=32, **TWO),
    "road-4": peft.RoadConfig(variant="road_4", group_size=16, **TWO),
    "beft": peft.BeftConfig(**TWO),
}


def randomised(model: torch.nn.Module, config: peft.PeftConfig) -> peft.PeftModel:
    """A `PeftModel` whose adapter has left its initialisation."""
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(11)
    for name, value in wrapped.named_parameters():
        if value.requires_grad:
            noise = torch.randn(value.shape, generator=generator) * 0.1
            value.copy_(value + noise if "magnitude" in name else noise + 0.05)
    return wrapped


# PEFT's live layers still hold the ranks that its file leaves out.
SAVED_ANEW = {"adalora-kept"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_adapter_computes_what_peft_computes(
    name, tmp_path, tiny_llama, base, base_weights
):
    weights = base_weights(tiny_llama())
    wrapped = randomised(tiny_llama(), CONFIGS[name])
    wrapped.save_pretrained(tmp_path)
    if name in SAVED_ANEW:
        wrapped = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path)
    loaded = read_adapter(tmp_path, base, max_rank=16, base_weights=weights)
    assert loaded.peft_type == CONFIGS[name].peft_type
    live = {
        path: module
        for path, module in wrapped.get_base_model().named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    assert loaded.layers.keys() == live.keys()
    for path, parts in loaded.layers.items():
        linear = live[path].get_base_layer()
        x = torch.randn(5, linear.in_features)
        torch.testing.assert_close(
            apply_parts(x, linear, parts), live[path](x), atol=2e-5, rtol=2e-5
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_live_adapter_has_the_digest_of_its_folder(
    name, tmp_path, tiny_llama, base, facts, base_weights
):
    weights = base_weights(tiny_llama())
    wrapped = randomised(tiny_llama(), CONFIGS[name])
    live = weights_from_peft(wrapped, "default", facts(wrapped), max_rank=16, base_weights=weights)
    wrapped.save_pretrained(tmp_path)
    saved = read_adapter(tmp_path, base, max_rank=16, base_weights=weights)
    assert live.digest == saved.digest
    before = {key: value.clone() for key, value in tiny_llama().state_dict().items()}
    plain, _ = unwrap_peft(wrapped)
    after = plain.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_need_of_the_input_what_the_type_states_at_most(
    name, tmp_path, tiny_llama, base, base_weights
):
    wrapped = randomised(tiny_llama(), CONFIGS[name])
    wrapped.save_pretrained(tmp_path)
    loaded = read_adapter(tmp_path, base, max_rank=16, base_weights=base_weights(tiny_llama()))
    order = [Effect.OUTPUT, Effect.RAW, Effect.INPUT]
    needs = max(order.index(effect_of(parts)) for parts in loaded.layers.values())
    assert needs == order.index(TUNERS[loaded.peft_type].effect)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("config", [
    peft.VeraConfig(r=8, **TWO),
    peft.LoHaConfig(r=2, alpha=3, **TWO),
    peft.LoKrConfig(r=2, alpha=3, decompose_both=True, **TWO),
    peft.LoKrConfig(r=1, alpha=3, decompose_factor=2, **TWO),
], ids=["vera", "loha", "lokr", "lokr-whole"])  # fmt: skip
def test_what_fits_no_slot_is_dense_and_noted(config, tmp_path, tiny_llama, base):
    randomised(tiny_llama(), config).save_pretrained(tmp_path)
    plan = read_plan(tmp_path, base, max_rank=64)
    product = read_adapter(tmp_path, base, max_rank=64)
    dense = read_adapter(tmp_path, base, max_rank=1)
    x = torch.randn(5, 128)
    for name, parts in product.layers.items():
        assert parts.rank == plan.tuner.product_rank(plan.config, plan.modules[name].module) > 1
        assert dense.layers[name].low_rank is None
        linear = torch.nn.Linear(plan.modules[name].target.in_features, parts.low_rank.b.shape[0])
        fed = x[:, : linear.in_features]
        torch.testing.assert_close(
            apply_parts(fed, linear, dense.layers[name]), apply_parts(fed, linear, parts)
        )
    assert not any("dense" in note for note in product.notes)
    assert any("dense" in note and "rank 1" in note for note in dense.notes)


def test_each_type_of_peft_is_served_or_refused_with_a_reason():
    assert {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} == TUNERS.keys() | UNSERVED.keys()
    assert not TUNERS.keys() & UNSERVED.keys()


# What older files, or files made by hand, carry along.
BEYOND_PEFT = {
    "LORA": {"enable_lora", "merge_weights"},
    "ADALORA": {"enable_lora", "merge_weights"},
    "IA3": {"r", "lora_alpha", "lora_dropout", "bias"},
}


@pytest.mark.parametrize("kind", TUNERS)
def test_every_key_of_peft_stands_in_exactly_one_table(kind):
    keys = TUNERS[kind].keys
    tables = [keys.all_served, keys.all_harmless.keys(), keys.refused.keys()]
    known = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    assert set().union(*tables) == known | BEYOND_PEFT.get(kind, set())
    assert sum(len(table) for table in tables) == len(set().union(*tables))
    assert keys.required <= keys.served
    assert keys.optional_none <= keys.served


@pytest.mark.parametrize("kind", TUNERS)
def test_every_served_key_is_read_or_fixed(kind):
    tuner = TUNERS[kind]
    read = tuner.config.model_fields.keys()
    assert tuner.keys.served - tuner.keys.optional_none <= read
    unread = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    unread |= {"modules_to_save", "trainable_token_indices", "task_type", "peft_version"}
    assert read - unread <= tuner.keys.served


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_missing_and_an_unknown_tensor_are_each_refused_by_name(
    name, tmp_path, tiny_llama, base, base_weights
):
    randomised(tiny_llama(), CONFIGS[name]).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    victim = next(key for key in tensors if ".layers.0." in key)
    layer = re.escape(victim.removeprefix("base_model.model.").rpartition("_proj")[0])
    for changed, word in (
        ({key: value for key, value in tensors.items() if key != victim}, layer),
        (tensors | {f"{victim}_extra": torch.zeros(1)}, "_extra"),
        (tensors | {victim: torch.zeros(3, 3, 3, 3, 3)}, layer),
        (tensors | {victim: torch.full_like(tensors[victim], float("nan"))}, "NaN"),
        (tensors | {victim: tensors[victim].to(torch.float8_e4m3fn)}, "float8"),
    ):
        save_file(changed, path)
        with pytest.raises(AdapterError, match=word):
            read_adapter(tmp_path, base, max_rank=16, base_weights=base_weights(tiny_llama()))


@pytest.mark.parametrize("kind", UNSERVED)
def test_a_type_that_is_not_served_is_refused_by_name_with_its_reason(kind, plain, base):
    with pytest.raises(AdapterUnsupportedError) as caught:
        read_adapter(edit_adapter(plain, peft_type=kind), base, max_rank=16)
    assert repr(kind) in str(caught.value)
    assert UNSERVED[kind].reason in str(caught.value)


def test_ia3_takes_a_feed_forward_module_for_what_the_config_says(tmp_path, tiny_llama, base):
    config = peft.IA3Config(feedforward_modules=["down_proj"], **TWO)
    randomised(tiny_llama(), config).save_pretrained(tmp_path)
    with pytest.raises(AdapterFormatError, match="'up_proj', which is no target"):
        read_adapter(edit_adapter(tmp_path, feedforward_modules=["up_proj"]), base, max_rank=16)
    # A vector of an output where one of an input is asked for.
    with pytest.raises(AdapterError, match=r"q_proj.*\[64, 1\].*\[1, 64\]"):
        read_adapter(edit_adapter(tmp_path, feedforward_modules=["q_proj"]), base, max_rank=16)
    # By the end of the text, as PEFT does it.
    assert (
        read_adapter(
            edit_adapter(
                tmp_path,
                target_modules=["q_proj", "down_proj", "n_proj"],
                feedforward_modules=["n_proj"],
            ),
            base,
            max_rank=16,
        )
        .layers["model.layers.0.mlp.down_proj"]
        .in_scale
        is not None
    )
