"""An adapter on another base than its own: refused by name, loaded with a note where allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

import branchline
from branchline.core.errors import AdapterMismatchError
from tests.helpers import edit_adapter, edit_json
from tests.models import build, save_adapter


def adapter_of(folder: Path, base: str) -> Path:
    """A folder of a LoRA that fits the small Llama, trained on `base` as it says."""
    save_adapter(build("llama"), folder, ["q_proj"], rank=4, seed=1)
    return edit_adapter(folder, base_model_name_or_path=base)


def served(name: str, **settings):
    model = build("llama")
    model.config._name_or_path = name
    return branchline.wrap(model, **settings)


def test_another_hub_id_is_refused_and_may_be_allowed(tmp_path):
    folder = adapter_of(tmp_path, "acme/Tiny-Chat")
    strict = served("acme/Tiny")
    with pytest.raises(AdapterMismatchError, match=r"'acme/Tiny-Chat'.*'acme/Tiny'.*allow_base"):
        strict.adapters.load("chat", folder)
    assert not strict.adapters.list()
    info = served("acme/Tiny", allow_base_mismatch=True).adapters.load("chat", folder)
    assert any("'acme/Tiny-Chat'" in note for note in info.notes)
    quiet = served("acme/Tiny-Chat-FP8").adapters.load("chat", folder)
    assert not any("acme" in note for note in quiet.notes)
    assert quiet.digest == info.digest


def test_a_local_base_of_other_sizes_is_refused(tmp_path):
    base = tmp_path / "base"
    build("llama").config.save_pretrained(base)
    folder = adapter_of(tmp_path / "adapter", str(base))
    assert served("/srv/base").adapters.load("sql", folder).rank == 4
    edit_json(base / "config.json", {"num_attention_heads": 8})
    with pytest.raises(AdapterMismatchError, match=r"number of heads 8 .num_attention_heads.* 4"):
        served("/srv/base").adapters.load("sql", folder)
    rooted = served("/srv/base", allowed_roots=str(folder))
    assert rooted.adapters.load("sql", folder).rank == 4
