"""The table of known prefixes, and the other ways in which names may differ."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from branchline.adapters.names import RULES, common_prefix
from branchline.adapters.read import read_adapter
from branchline.core.errors import AdapterFormatError, AdapterMismatchError


def renamed(folder: Path, old: str, new: str) -> Path:
    path = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new): value for name, value in load_file(path).items()}, path)
    return folder


def test_identity_is_the_first_rule():
    assert RULES[0].pairs == ()
    assert RULES[0].note is None


@pytest.mark.parametrize("rule", RULES[1:], ids=lambda rule: rule.pairs[0][0])
def test_every_known_prefix_maps_to_the_same_adapter_and_says_so(rule, plain, base):
    expected = read_adapter(plain, base, max_rank=16)
    adapter, model = rule.pairs[0]
    renamed(plain, f"base_model.model.{model}", f"base_model.model.{adapter}")
    weights = read_adapter(plain, base, max_rank=16)
    assert weights.digest == expected.digest
    assert rule.note in weights.notes


def test_patterns_are_matched_against_the_adapters_own_names(plain, base):
    own = "model.language_model.layers.0.self_attn.q_proj"
    renamed(plain, "model.layers.", "model.language_model.layers.")
    config = json.loads((plain / "adapter_config.json").read_text()) | {
        "target_modules": r"model\.language_model\.layers\..*\.(q|v)_proj",
        "alpha_pattern": {f"^{own}": 4},
    }
    (plain / "adapter_config.json").write_text(json.dumps(config))
    weights = read_adapter(plain, base, max_rank=16)
    assert weights.layers["model.layers.0.self_attn.q_proj"].low_rank.scaling == 0.5
    assert weights.layers["model.layers.1.self_attn.q_proj"].low_rank.scaling == 2.0


def test_names_with_an_adapter_name_are_read(plain, base):
    digest = read_adapter(plain, base, max_rank=16).digest
    weights = read_adapter(renamed(plain, ".weight", ".sql.weight"), base, max_rank=16)
    assert weights.digest == digest
    assert any("'sql'" in note for note in weights.notes)


def test_names_without_pefts_prefix_are_read(plain, base):
    digest = read_adapter(plain, base, max_rank=16).digest
    weights = read_adapter(renamed(plain, "base_model.model.", ""), base, max_rank=16)
    assert weights.digest == digest
    assert any("prefix" in note for note in weights.notes)


def test_two_adapters_in_one_file_are_refused(plain, base):
    renamed(plain, "0.self_attn.q_proj.lora_A.weight", "0.self_attn.q_proj.lora_A.sql.weight")
    with pytest.raises(AdapterFormatError, match="more than one adapter"):
        read_adapter(plain, base, max_rank=16)


def test_two_tensors_for_one_half_are_refused(plain, base):
    path = plain / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name.replace("base_model.model.", "", 1): tensors[name].clone()}, path)
    with pytest.raises(AdapterFormatError, match="two tensors lora_A"):
        read_adapter(plain, base, max_rank=16)


def test_the_common_prefix_is_cut_at_dots():
    assert common_prefix(["a.bc.d", "a.bd.d"]) == "a"
    assert common_prefix(["a.b", "a.b"]) == "a.b"
    assert common_prefix(["a", "b"]) == common_prefix([]) == ""


def test_names_that_share_nothing_are_listed(plain, base):
    renamed(plain, "base_model.model.model.layers.0", "first")
    renamed(plain, "base_model.model.model.layers.1", "second")
    with pytest.raises(AdapterMismatchError, match=r"no tensor .*'first\.self_attn\.q_proj'"):
        read_adapter(plain, base, max_rank=16)
