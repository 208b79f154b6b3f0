"""`branchline inspect` of adapters: what they hold, and whether they fit a model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import HRAConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import branchline as package
from branchline.adapters.branch import LayerBranch
from branchline.adapters.slots import SlotClasses
from branchline.adapters.weights import LayerWeights, LowRank
from branchline.core.errors import ConfigError
from branchline.serving.inspect import inspect_source
from tests.helpers import edit_adapter

LINEARS_A_LAYER = 7


# --- adapters


def test_an_adapter(branchline, sql):
    done = branchline("inspect", sql, "--json")
    assert done.code == 0, done.err
    report = done.json
    assert (report["schema_version"], report["kind"], report["on"]) == (1, "adapter", None)
    assert report["adapter"]["targets"] == ["down_proj"]
    modules = report["adapter"]["modules"]
    assert [module["shape"] for module in modules] == [[32, 64]] * 2
    assert all(module["parts"] == ["low-rank"] and module["reads_raw"] for module in modules)
    out = branchline("inspect", sql).out
    assert "model.layers.*.mlp.down_proj (x2)" in out
    assert report["adapter"]["digest"] in out


@pytest.mark.parametrize("model", ["model_folder", "mixed"])
def test_an_adapter_on_a_model_costs_what_loading_it_costs(branchline, request, tone, model):
    folder = request.getfixturevalue(model)
    done = branchline("inspect", tone, "--on", folder, "--max-lora-rank", 8, "--json")
    assert done.code == 0, done.err
    fit = done.json["on"]
    served = package.wrap(package.load_model(folder), max_lora_rank=8)
    loaded = served.adapters.load("tone", tone)
    assert fit["digest"] == loaded.digest
    layers = {f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qv"}
    assert set(fit["raw"]) == layers
    assert fit["linears_of_model"] == 2 * LINEARS_A_LAYER + 1
    slots = [
        LayerBranch(n, SlotClasses((8,)), 32, 32, torch.bfloat16, torch.device("cpu"))
        for n in layers
    ]
    for slot in slots:
        slot.write(0, LayerWeights(low_rank=LowRank(torch.ones(4, 32), torch.ones(32, 4), 1.0)))
    assert fit["slot_nbytes"] == sum(slot.nbytes for slot in slots) > 0
    out = branchline("inspect", tone, "--on", folder).out
    assert "fits; a slot of rank 16 takes" in out
    assert "4 of 15 linears raw" in out


def test_an_adapter_that_takes_the_weights_of_the_base_fits(branchline, model_folder, tmp_path):
    config = LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], use_dora=True, task_type="CAUSAL_LM"
    )
    get_peft_model(LlamaForCausalLM.from_pretrained(model_folder), config).save_pretrained(tmp_path)
    done = branchline("inspect", tmp_path, "--on", model_folder, "--json")
    assert done.code == 0, done.err
    fit = done.json["on"]
    assert fit["problem"] is None
    assert fit["digest"] is None
    assert any("DoRA" in note and "base's weights" in note for note in fit["notes"])
    served = package.wrap(package.load_model(model_folder))
    served.adapters.load("tone", tmp_path)
    live = served.adapters.live(["tone"])
    layers = served.registry.layers
    held = {name for name, layer in layers.items() if served.registry.branches(layer, live)}
    assert set(fit["raw"]) == held
    wide = LlamaConfig(vocab_size=48, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    LlamaForCausalLM(wide).save_pretrained(tmp_path / "wide")
    assert "is for 32 inputs" in branchline("inspect", tmp_path, "--on", tmp_path / "wide").refusal


def test_a_slot_costs_what_all_parts_of_an_adapter_take(branchline, model_folder, tmp_path):
    config = LoraConfig(
        r=4,
        target_modules=["embed_tokens"],
        modules_to_save=["model.norm", "o_proj"],
        task_type="CAUSAL_LM",
    )
    get_peft_model(LlamaForCausalLM.from_pretrained(model_folder), config).save_pretrained(
        tmp_path, save_embedding_layers=False
    )
    done = branchline("inspect", tmp_path, "--on", model_folder, "--json")
    assert done.code == 0, done.err
    served = package.wrap(package.load_model(model_folder))
    served.adapters.load("parts", tmp_path)
    # None of these parts lies in a stack that has room for other slots.
    assert done.json["on"]["slot_nbytes"] == served.adapters.memory().device_bytes > 0


def row(out: str, name: str) -> list[str]:
    """The cells of one module's line."""
    (line,) = [line for line in out.splitlines() if line.strip().startswith(name)]
    return [cell.strip() for cell in re.split(r"\s{2,}", line.strip())]


def test_the_table_tells_all_that_an_adapter_holds(branchline, model_folder, tmp_path):
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["embed_tokens", "q_proj"],
        modules_to_save=["model.norm", "o_proj"],
        task_type="CAUSAL_LM",
    )
    get_peft_model(LlamaForCausalLM.from_pretrained(model_folder), config).save_pretrained(
        tmp_path, save_embedding_layers=False
    )
    alone = branchline("inspect", tmp_path).out
    queries, outputs = (f"model.layers.*.self_attn.{x}_proj (x2)" for x in "qo")
    assert row(alone, queries) == [queries, "lora_A, lora_B", "4", "2", "?"]
    assert row(alone, "model.norm") == ["model.norm", "weight", "?"]
    out = branchline("inspect", tmp_path, "--on", model_folder).out
    assert row(out, queries) == [queries, "low-rank", "4", "2", "32 x 32", "yes"]
    assert row(out, outputs) == [outputs, "weight", "32 x 32", "yes"]
    assert row(out, "model.norm") == ["model.norm", "weight", "32", "no"]
    embedding = row(out, "model.embed_tokens")
    assert (embedding[1:4], embedding[-1]) == (["low-rank", "4", "2"], "no")


@pytest.mark.parametrize("as_trained", [True, False])
def test_a_copy_of_the_embedding_is_left_to_a_load(branchline, model_folder, tmp_path, as_trained):
    config = LoraConfig(r=4, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
    base = LlamaForCausalLM.from_pretrained(model_folder)
    get_peft_model(base, config).save_pretrained(tmp_path, save_embedding_layers=True)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    (copy,) = [name for name in tensors if "embed_tokens.base_layer" in name]
    if not as_trained:
        save_file(tensors | {copy: tensors[copy] + 1}, file, {"format": "pt"})
    fit = branchline("inspect", tmp_path, "--on", model_folder, "--json").json["on"]
    assert (fit["problem"], fit["digest"], fit["slot_nbytes"]) == (None, None, None)
    assert any("model.embed_tokens" in note and "told by a load" in note for note in fit["notes"])


# --- sources of an adapter


def test_an_archive_is_told_as_its_folder_is(branchline, model_folder, sql, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", sql)
    for extra in ((), ("--on", model_folder)):
        folder = branchline("inspect", sql, *extra, "--json").json
        packed = branchline("inspect", archive, *extra, "--json").json
        assert packed.pop("source") == archive
        assert folder.pop("source") == str(sql)
        assert packed == folder


def test_a_url_is_no_path(branchline, sql):
    assert branchline("inspect", f"file://{sql}", "--json").json["source"] == str(sql)
    error = branchline("inspect", "nowhere://bucket/sql").error
    assert "nowhere://bucket/sql" in error


def test_messages_name_the_source_and_no_copy_of_it(branchline, model_folder, sql, tmp_path):
    folder = Path(shutil.copytree(sql, tmp_path / "sql"))
    edit_adapter(folder, frobnicate=3)
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", folder)
    line = branchline("inspect", archive).refusal
    assert line.startswith(f"refused: adapter {archive!r}: ")
    line = branchline("inspect", archive, "--on", model_folder).refusal
    assert line.startswith(f"refused: adapter {archive!r}: ")
    wide = branchline("inspect", sql, "--on", model_folder, "--max-lora-rank", 2)
    assert wide.refusal.startswith(f"refused: adapter {str(sql)!r}: ")


def test_limits_count_as_for_a_load(branchline, model_folder, sql, tone):
    done = branchline("inspect", sql, "--allowed-roots", tone)
    assert "lies outside of the allowed roots" in done.error
    assert branchline("inspect", sql, "--allowed-roots", sql.parent).code == 0
    assert "max_adapter_bytes" in branchline("inspect", sql, "--max-adapter-bytes", 9).error
    done = branchline("inspect", model_folder, "--max-adapter-bytes", 9)
    assert "is for an adapter" in done.error


def test_another_base_does_not_fit_unless_it_is_allowed(branchline, model_folder, sql, tmp_path):
    served = tmp_path / "models--acme--Tiny" / "snapshots" / "0123456789abcdef"
    served.parent.mkdir(parents=True)
    served.symlink_to(model_folder)
    adapter = Path(shutil.copytree(sql, tmp_path / "sql"))
    edit_adapter(adapter, base_model_name_or_path="acme/Other")
    command = ("inspect", adapter, "--on", served)
    assert "--allow-base-mismatch" in branchline(*command).refusal
    assert branchline(*command, "--allow-base-mismatch").code == 0
    assert branchline("inspect", adapter, "--allow-base-mismatch").code == 2


def test_an_adapter_that_does_not_fit(branchline, tone, mixed, tmp_path):
    line = branchline("inspect", tone, "--on", mixed, "--max-lora-rank", 2).refusal
    assert "rank 4 but slots were sized for 2" in line
    wide = LlamaConfig(vocab_size=48, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    LlamaForCausalLM(wide).save_pretrained(tmp_path)
    done = branchline("inspect", tone, "--on", tmp_path)
    assert "is for 32 inputs but the layer has 64" in done.refusal
    assert "does not fit" in done.out


def test_an_adapter_that_is_not_served(branchline, model_folder, tmp_path):
    config = HRAConfig(target_modules=["k_proj"], task_type="CAUSAL_LM")
    get_peft_model(LlamaForCausalLM.from_pretrained(model_folder), config).save_pretrained(tmp_path)
    done = branchline("inspect", tmp_path)
    assert "PEFT type 'HRA' is not served" in done.refusal
    assert "adapter HRA, " in done.out


def test_a_base_that_is_no_model(branchline, sql, tone):
    assert "holds a PEFT adapter" in branchline("inspect", sql, "--on", tone).error


def test_flags_that_go_with_an_adapter(branchline, model_folder, sql):
    assert "is for an adapter" in branchline("inspect", model_folder, "--on", sql).error
    assert branchline("inspect", sql, "--max-lora-rank", 8).code == 2
    with pytest.raises(ConfigError, match="max_lora_rank"):
        inspect_source(model_folder, max_lora_rank=8)
