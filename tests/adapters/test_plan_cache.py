"""What was checked once is not checked again, and nothing else is taken for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from branchline.adapters import read
from branchline.adapters.read import PlanCache, read_adapter
from branchline.core.errors import AdapterFormatError, AdapterMismatchError
from tests.helpers import edit_adapter, edit_tensors

FILE = "adapter_model.safetensors"


@pytest.fixture
def planned(monkeypatch) -> list[str]:
    """The subject of every check."""
    found: list[str] = []
    check = read.checked_plan

    def counted(parsed, headers, base, *, max_rank, subject):
        found.append(subject)
        return check(parsed, headers, base, max_rank=max_rank, subject=subject)

    monkeypatch.setattr(read, "checked_plan", counted)
    return found


def test_a_training_run_is_checked_once(plain, base, planned):
    plans, digests = PlanCache(), set()
    for step in range(4):
        first = next(iter(read_adapter(plain, base, max_rank=16).layers.values()))
        name = next(n for n in _tensors(plain) if n.endswith("lora_B.weight"))
        edit_tensors(plain / FILE, {name: torch.full_like(first.low_rank.b, float(step))})
        planned.clear()
        cached = read_adapter(plain, base, max_rank=16, plans=plans)
        assert bool(planned) == (step == 0)
        fresh = read_adapter(plain, base, max_rank=16)
        assert cached.digest == fresh.digest
        assert cached.config == fresh.config
        assert cached.notes == fresh.notes
        digests.add(cached.digest)
    assert len(digests) == 4


def test_another_config_or_header_is_checked_anew(plain, base, planned):
    plans = PlanCache()
    digest = read_adapter(plain, base, max_rank=16, plans=plans).digest
    edit_adapter(plain, lora_alpha=3)
    assert read_adapter(plain, base, max_rank=16, plans=plans).digest != digest
    assert len(planned) == 2
    name = next(n for n in _tensors(plain) if n.endswith("lora_B.weight"))
    edit_tensors(plain / FILE, {name: None})
    for _ in range(2):
        with pytest.raises(AdapterFormatError):
            read_adapter(plain, base, max_rank=16, plans=plans)
    assert len(planned) == 4, "what was refused is not kept"


def test_numbers_are_looked_at_every_time(plain, base):
    plans = PlanCache()
    read_adapter(plain, base, max_rank=16, plans=plans)
    name, tensor = next(iter(_tensors(plain).items()))
    edit_tensors(plain / FILE, {name: torch.full_like(tensor, torch.nan)})
    with pytest.raises(AdapterFormatError, match="holds NaN"):
        read_adapter(plain, base, max_rank=16, plans=plans)


def test_a_file_that_was_cut_is_refused(plain, base):
    plans = PlanCache()
    read_adapter(plain, base, max_rank=16, plans=plans)
    data = (plain / FILE).read_bytes()
    for cut in (data[:-1], data + b"\0"):
        (plain / FILE).write_bytes(cut)
        with pytest.raises(AdapterFormatError, match=r"truncated|longer than its tensors"):
            read_adapter(plain, base, max_rank=16, plans=plans)


def test_it_keeps_the_latest(plain, base, planned, monkeypatch):
    monkeypatch.setattr(read, "_MOST_KEPT", 2)
    plans = PlanCache()
    for alpha in (1, 2, 3, 2, 3, 1):
        edit_adapter(plain, lora_alpha=alpha)
        read_adapter(plain, base, max_rank=16, plans=plans)
    assert len(planned) == 4


def test_two_bases_need_two(plain, base, planned):
    """A cache belongs to one manager; another base checks for itself."""
    read_adapter(plain, base, max_rank=16, plans=PlanCache())
    unknown = replace(base, layers={})
    with pytest.raises(AdapterMismatchError):
        read_adapter(plain, unknown, max_rank=16, plans=PlanCache())


def _tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / FILE)


def test_the_base_is_compared_every_time(plain, base, tmp_path):
    """It may be a folder, which comes, goes and changes."""
    other = tmp_path / "base"
    edit_adapter(plain, base_model_name_or_path=str(other))
    plans = PlanCache()
    notes = read_adapter(plain, base, max_rank=16, plans=plans).notes
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 3}))
    with pytest.raises(AdapterMismatchError):
        read_adapter(plain, base, max_rank=16, plans=plans)
    shutil.rmtree(other)
    assert read_adapter(plain, base, max_rank=16, plans=plans).notes == notes


def test_configs_are_not_shared(plain, base):
    plans = PlanCache()
    one, other = (read_adapter(plain, base, max_rank=16, plans=plans).config for _ in range(2))
    one["target_modules"].clear()
    assert other["target_modules"]
    assert read_adapter(plain, base, max_rank=16, plans=plans).config["target_modules"]
