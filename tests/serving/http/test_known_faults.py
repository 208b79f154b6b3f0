"""Faults that servers of adapters are prone to; each test would show its own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

import branchline
from branchline.serving.http.state import ServerState
from tests.helpers import edit_adapter, edit_tensors
from tests.models import save_adapter
from tests.serving.http.conftest import Address
from tests.serving.http.inside import client_of, listening, serving

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> torch.nn.Module:
    return branchline.load_model(model_folder)


@pytest.fixture
def root(adapter_folders) -> Path:
    return next(iter(adapter_folders.values())).parent


@pytest.fixture
def make(root: Path, plain, request):
    """Adapters below the allowed root, removed afterwards."""
    made: list[Path] = []

    def make(name: str, **settings) -> Path:
        folder = root / f"{name}-{abs(hash(request.node.name)) % 10**6}"
        made.append(folder)
        settings = {"rank": 4, "seed": 11, **settings}
        targets = settings.pop("targets", ["q_proj", "v_proj"])
        return save_adapter(plain, folder, targets, **settings)

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def load(server: Address, name: str, folder: Path, **more) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)


def unload(server: Address, name: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)


def ask(server: Address, model: str, prompt: str = PROMPT, tokens: int = 16) -> httpx.Response:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def answer(server: Address, model: str, prompt: str = PROMPT) -> tuple:
    response = ask(server, model, prompt)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"], tuple(choice["logprobs"]["token_logprobs"])


def listed(server: Address) -> dict[str, dict]:
    found = httpx.get(f"{server.url}/v1/adapters", timeout=60).json()
    return {entry["name"]: entry for entry in found["data"]}


def memory(server: Address) -> dict[str, float]:
    """Slots that are taken and bytes in host memory, as the metrics tell them."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    wanted = ("branchline_adapter_slots_taken", "branchline_adapter_host_bytes")
    found = {n: float(v) for n, v in (x.rsplit(" ", 1) for x in lines if x.startswith(wanted))}
    assert len(found) == 2, lines
    return found


def test_unloading_frees_slot_and_memory(server, make):
    before = memory(server)
    assert load(server, "freed", make("freed")).status_code == 200
    answer(server, "freed")
    assert listed(server)["freed"]["slot"] is not None
    assert unload(server, "freed").status_code == 200
    assert memory(server) == before
    assert "freed" not in listed(server)
    assert ask(server, "freed").status_code == 404


def test_evicted_adapter_whose_folder_is_gone_fails_alone(model_folder, adapter_folders, make):
    folder = make("vanishing")
    few = {"max_loras": 1, "max_cpu_loras": 1}
    adapters = {"attn": adapter_folders["attn"], "vanishing": folder}
    with serving(model_folder, adapters, **few) as state, listening(state) as server:
        answer(server, "vanishing")
        wanted = answer(server, "attn")
        shutil.rmtree(folder)
        # Host memory keeps one: this one was evicted, and cannot come back.
        broken = ask(server, "vanishing")
        assert broken.status_code == 503
        assert "vanishing" in broken.json()["error"]["message"]
        assert answer(server, "attn") == wanted
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_folder_may_vanish_after_loading(server, make):
    folder = make("kept")
    assert load(server, "kept", folder).status_code == 200
    wanted = answer(server, "kept")
    shutil.rmtree(folder)
    assert answer(server, "kept") == wanted
    assert unload(server, "kept").status_code == 200


def test_failed_load_in_place_leaves_the_old_version_whole(server, make):
    assert load(server, "stays", make("stays")).status_code == 200
    wanted = answer(server, "stays")
    bad = make("bad", rank=4, seed=3)
    file = bad / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    edit_tensors(file, {name: tensors[name][:, :-1].contiguous()})
    response = load(server, "stays", bad, load_inplace=True)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert answer(server, "stays") == wanted
    assert unload(server, "stays").status_code == 200


def test_reload_from_the_same_path_takes_no_old_prefix(server, make, plain):
    folder = make("again", seed=1)
    assert load(server, "again", folder).status_code == 200
    long = PROMPT * 5
    old = answer(server, "again", long)
    shutil.rmtree(folder)
    save_adapter(plain, folder, ["q_proj", "k_proj", "down_proj"], rank=8, seed=2)
    assert load(server, "again", folder, load_inplace=True).status_code == 200
    new = answer(server, "again", long)
    # Under a name that never had another content there is nothing to mix.
    assert load(server, "fresh", folder).status_code == 200
    assert new == answer(server, "fresh", long) != old
    for name in ("again", "fresh"):
        assert unload(server, name).status_code == 200


@pytest.mark.parametrize(
    "fault", ["width", "nothing matches", "NaN", "rank of the config", "another base"]
)
def test_adapters_that_do_not_fit_are_refused(server, make, fault):
    folder = make("wrong")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(name for name in tensors if "lora_A" in name)
    if fault == "width":
        edit_tensors(file, {first: tensors[first][:, :-8].contiguous()})
    elif fault == "nothing matches":
        edit_tensors(file, dict.fromkeys(tensors) | {f"other.{n}": t for n, t in tensors.items()})
    elif fault == "NaN":
        edit_tensors(file, {first: torch.full_like(tensors[first], torch.nan)})
    elif fault == "rank of the config":
        edit_adapter(folder, r=7)
    else:
        # Of a deeper model: its last layers are not there.
        deeper = {n.replace(".layers.1.", ".layers.7."): t for n, t in tensors.items()}
        edit_tensors(file, dict.fromkeys(tensors) | deeper)
    response = load(server, "wrong", folder)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"]
    assert error["code"] == 400
    assert "wrong" not in listed(server)
    assert ask(server, "wrong").status_code == 404


def test_overflowing_adapter_changes_nobody_elses_answer(server, make):
    wanted = {name: answer(server, name) for name in ("attn", "mlp", server.model)}
    folder = make("huge", targets=["k_proj", "v_proj"])
    file = folder / "adapter_model.safetensors"
    edit_tensors(file, {n: torch.full_like(t, 1e30) for n, t in load_file(file).items()})
    # Its weights are finite: what they do shows at run time only.
    assert load(server, "huge", folder).status_code == 200
    for turn in range(8):
        failed = ask(server, "huge", f"{turn} {PROMPT}")
        assert failed.status_code == 500
        assert "'huge'" in failed.json()["error"]["message"]
    assert unload(server, "huge").status_code == 200
    for name, before in wanted.items():
        assert answer(server, name) == before
    for turn in range(8):
        answer(server, "attn", f"{turn} {PROMPT}")


def test_time_does_not_follow_the_configured_rank(model_folder, adapter_folders):
    adapters = {"all": adapter_folders["all"]}

    def seconds(state: ServerState) -> float:
        with client_of(state) as client:
            body = {"model": "all", "prompt": PROMPT, "max_tokens": 64, "ignore_eos": True}
            begun = time.perf_counter()
            assert client.post("/v1/completions", json=body).status_code == 200
            return time.perf_counter() - begun

    with (
        serving(model_folder, adapters, max_lora_rank=16) as small,
        serving(model_folder, adapters, max_lora_rank=256) as large,
    ):
        for state in (small, large):
            seconds(state)
        pairs = [(seconds(small), seconds(large)) for _ in range(4)]
    # Work for the whole width would take sixteen times as long; noise does not.
    assert min(b for _, b in pairs) < 3 * min(a for a, _ in pairs)


def test_it_is_told_which_adapter_lies_where(server, adapter_folders):
    for name in adapter_folders:
        answer(server, name)
    found = listed(server)
    assert set(adapter_folders) <= set(found)
    for name, folder in adapter_folders.items():
        entry = found[name]
        assert entry["tier"] == "device"
        assert isinstance(entry["slot"], int)
        assert len(entry["digest"]) == 64
        assert entry["source"] == str(folder)
        assert entry["state"] == "ready"
