"""Adapters that come and go over HTTP; the audit, health and readiness."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from starlette.testclient import TestClient
from transformers import AutoTokenizer

import branchline
from branchline.core.errors import ConfigError
from branchline.serving.http import route_checks
from branchline.serving.http.app import create_app
from branchline.serving.http.start import LoadedModel, base_names, make_state
from branchline.serving.http.state import ServerState
from branchline.serving.serve_config import ServeConfig
from tests.helpers import edit_adapter


@pytest.fixture(scope="module")
def root(adapter_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The allowed root: good adapters, and some that cannot be served."""
    root = tmp_path_factory.mktemp("root")
    for name, folder in adapter_folders.items():
        shutil.copytree(folder, root / name)
    good = adapter_folders["attn"]

    def spoiled(name: str) -> Path:
        return shutil.copytree(good, root / name)

    tensors = load_file(good / "adapter_model.safetensors")
    first = next(name for name in tensors if "lora_A" in name)
    edit_adapter(spoiled("dora"), use_dora="yes")
    edit_adapter(spoiled("high-rank"), r=64)
    edit_adapter(spoiled("nan"), {first: torch.full_like(tensors[first], float("nan"))})
    edit_adapter(spoiled("narrow"), {first: tensors[first][:, :-1].contiguous()})
    (spoiled("truncated") / "adapter_model.safetensors").write_bytes(b"\0" * 9)
    (spoiled("no-json") / "adapter_config.json").write_text("{")
    (spoiled("no-config") / "adapter_config.json").unlink()
    (root / "link").symlink_to(good)
    return root


@pytest.fixture(scope="module")
def state(model_folder: Path, root: Path) -> Iterator[ServerState]:
    config = ServeConfig.checked(
        allow_runtime_lora_updating=True, allowed_roots=str(root), lora_modules=f"attn={root}/attn"
    )
    served = branchline.wrap(branchline.load_model(model_folder), allowed_roots=str(root))
    for module in config.modules:
        served.adapters.load(module.name, module.path)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    loaded = LoadedModel(served, tokenizer, model_folder)
    made = make_state(loaded, config, base_names(config, model_folder))
    yield made
    assert made.engine is not None
    made.engine.stop(5.0)
    made.close()


@pytest.fixture
def client(state: ServerState) -> Iterator[TestClient]:
    """A server whose only adapter is `attn`."""
    with TestClient(create_app(state)) as client:
        yield client
    adapters = state.served.adapters
    for info in adapters.list():
        if info.name != "attn":
            adapters.unload(info.name)
    assert [info.name for info in adapters.list()] == ["attn"]


def load(client: TestClient, name: object, path: object, **more: object):
    return client.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more}
    )


def unload(client: TestClient, name: str):
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name, "lora_int_id": None})


def names(client: TestClient) -> list[str]:
    return [line["name"] for line in client.get("/v1/adapters").json()["data"]]


# --- adapters ------------------------------------------------------------------------------------


def test_an_adapter_comes_and_goes(client, root):
    answer = load(client, "mlp", root / "mlp")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert "'mlp'" in answer.text
    assert names(client) == ["attn", "mlp"]
    assert "mlp" in [card["id"] for card in client.get("/v1/models").json()["data"]]
    answer = unload(client, "mlp")
    assert answer.status_code == 200
    assert "'mlp'" in answer.text
    assert names(client) == ["attn"]
    answer = unload(client, "mlp")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"


def test_sagemaker_s_form_of_the_same(client, root):
    assert client.post("/adapters", json={"name": "org/mlp", "src": f"{root}/mlp"}).is_success
    assert names(client) == ["attn", "org/mlp"]
    refused = client.post("/adapters", json={"name": "org/mlp", "src": "x"})
    assert refused.status_code == 403
    assert refused.json()["error"]["param"] == "src"
    assert client.delete("/adapters/org/mlp").status_code == 200
    assert names(client) == ["attn"]
    assert client.delete("/adapters/org/mlp").status_code == 404


def test_a_name_that_is_loaded_takes_another_content_only_when_asked(client, root, state):
    load(client, "mine", root / "mlp")
    before = state.served.adapters.info("mine").digest
    refused = load(client, "mine", root / "all")
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "InvalidUserInput"
    assert state.served.adapters.info("mine").digest == before
    assert load(client, "mine", root / "all", load_inplace=True).status_code == 200
    assert state.served.adapters.info("mine").digest != before


def test_in_place_of_nothing_is_a_load(client, root):
    assert load(client, "mine", root / "mlp", load_inplace=True).status_code == 200


def test_a_failed_load_in_place_leaves_what_was_there(client, root, state):
    load(client, "mine", root / "mlp")
    before = state.served.adapters.info("mine")
    for bad in ("nan", "truncated", "nowhere", "no-config"):
        assert load(client, "mine", root / bad, load_inplace=True).is_client_error
    assert state.served.adapters.info("mine") == before


@pytest.mark.parametrize(
    ("folder", "status", "said"),
    [
        ("dora", 400, "use_dora"),
        ("high-rank", 400, "rank"),
        ("nan", 400, "NaN"),
        ("narrow", 400, "63 inputs"),
        ("truncated", 400, "adapter_model.safetensors"),
        ("no-json", 400, "adapter_config.json"),
        ("no-config", 404, "adapter_config.json"),
        ("nowhere", 404, "no such folder"),
        ("../elsewhere", 403, "outside of the allowed roots"),
        ("link", 403, "outside of the allowed roots"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(client, root, folder, status, said):
    answer = load(client, "bad", root / folder)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == "lora_path"
    assert said in error["message"]
    # It is named as the client wrote it, not by the copy that is read.
    assert f"{root / folder}" in error["message"]
    assert names(client) == ["attn"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "x"}, "body.lora_path"),
        ({"lora_path": "x"}, "body.lora_name"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": " "}, "lora_path"),
        ({"lora_name": 3, "lora_path": "x"}, "body.lora_name"),
        ({"lora_name": "x", "lora_path": "x", "load_inplace": "yes"}, "body.load_inplace"),
        ({"lora_name": "x", "lora_path": "x", "force": True}, "body.force"),
        ({"lora_name": "\ud800", "lora_path": "x"}, "body.lora_name"),
        ({"lora_name": "x", "lora_path": "\ud800"}, "body.lora_path"),
        ({"lora_name": "a\nb", "lora_path": "ROOT/mlp"}, "lora_name"),
        ({"lora_name": "__base__", "lora_path": "ROOT/mlp"}, "lora_name"),
        ({"lora_name": "tiny-llama", "lora_path": "ROOT/mlp"}, "lora_name"),
        ([], "body"),
    ],
)
def test_a_bad_request_names_its_field(client, root, body, param):
    text = json.dumps(body).replace("ROOT", str(root))
    answer = client.post(
        "/v1/load_lora_adapter", content=text, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == ("Bad Request" if param.startswith("body") else "InvalidUserInput")


def test_of_two_loads_of_one_name_one_wins(client, root):
    statuses: list[int] = []

    def run(folder: str) -> None:
        statuses.append(load(client, "mine", root / folder).status_code)

    threads = [threading.Thread(target=run, args=(folder,)) for folder in ("mlp", "all") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 400, 400, 400, 400, 400]


def test_a_load_checks_the_routes_of_what_it_loaded(client, root, state, monkeypatch):
    reports = []
    real = route_checks.check_numerics

    def watched(served, **settings):
        reports.append(real(served, **settings))
        return reports[-1]

    monkeypatch.setattr(route_checks, "check_numerics", watched)
    load(client, "mine", root / "all")
    (report,) = reports
    assert "mine" in report.adapters
    assert report.ok


def test_the_listing_tells_where_adapters_lie_and_what_they_cost(client, root, state):
    load(client, "mine", root / "mlp")
    listing = client.get("/v1/adapters").json()
    line = next(line for line in listing["data"] if line["name"] == "mine")
    info = state.served.adapters.info("mine")
    assert line["digest"] == info.digest
    assert line["source"] == str(root / "mlp")
    assert (line["state"], line["tier"], line["rank"]) == ("ready", "device", 8)
    assert line["bytes"] == info.nbytes > 0
    report = state.served.audit(adapter_sets=[()])
    costs = {adapter.name: adapter.sites_unfused for adapter in report.adapters}
    assert {line["name"]: line["sites_unfused"] for line in listing["data"]} == costs
    assert 0 < costs["mine"] < listing["sites"] == len(report.sites)


def test_updates_are_off_unless_they_are_asked_for(client, root, state, monkeypatch):
    closed = state.config.model_copy(update={"allow_runtime_lora_updating": False})
    monkeypatch.setattr(state, "config", closed)
    answers = [
        load(client, "mlp", root / "mlp"),
        unload(client, "attn"),
        client.post("/adapters", json={"name": "mlp", "src": f"{root}/mlp"}),
        client.delete("/adapters/attn"),
    ]
    for answer in answers:
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "updates_disabled"
        assert "--allow-runtime-lora-updating" in error["message"]
    assert names(client) == ["attn"]


# --- audit, health, readiness --------------------------------------------------------------------


def test_the_audit_is_told_in_three_forms(client, state):
    whole = client.get("/audit").json()
    assert whole["adapters"][0]["name"] == "attn"
    assert len(whole["sites"]) == len(state.served.audit().sites)
    text = client.get("/audit", params={"format": "text"})
    assert text.headers["content-type"].startswith("text/plain")
    assert "policy dynamic" in text.text
    page = client.get("/audit", params={"format": "html"})
    assert page.headers["content-type"].startswith("text/html")
    assert "silu_mul" in page.text
    assert client.get("/audit", params={"format": "xml"}).status_code == 400


def test_the_audit_answers_for_other_policies_and_batches(client):
    asked = [("policy", "dynamic"), ("policy", "absorbed"), ("tokens", "8")]
    told = client.get("/audit", params=asked).json()
    assert (told["policies"], told["tokens"]) == (["dynamic", "absorbed"], 8)
    refused = client.get("/audit", params={"policy": "nonsense"})
    assert refused.status_code == 400
    assert "nonsense" in refused.json()["error"]["message"]
    assert client.get("/audit", params={"tokens": 0}).status_code == 400


def test_a_name_that_is_markup_stays_text_in_the_audit(client, root):
    load(client, "<script>alert(1)</script>", root / "mlp")
    page = client.get("/audit", params={"format": "html"}).text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_server_that_serves_is_healthy_and_ready(client, state):
    assert client.get("/health").json() == {"status": "ok"}
    ready = client.get("/ready").json()
    assert ready["models"] == ["tiny-llama"]
    assert ready["self_check"]["ok"] is True
    assert client.get("/version").json()["branchline"] == branchline.__version__


def test_a_server_that_stops_is_healthy_and_not_ready(client, state, monkeypatch):
    monkeypatch.setattr(state, "stopping", True)
    assert client.get("/health").status_code == 200
    answer = client.get("/ready")
    assert answer.status_code == 503
    assert "stopping" in answer.json()["error"]["message"]


def test_a_server_whose_engine_died_is_neither(client, state, monkeypatch):
    class Dead:
        alive = False
        error = RuntimeError("out of ideas")

    monkeypatch.setattr(state, "engine", Dead())
    answer = client.get("/health")
    assert answer.status_code == 503
    assert "out of ideas" in answer.json()["error"]["message"]
    assert client.get("/ready").status_code == 503


def test_an_adapter_of_the_start_may_not_take_the_base_s_name(model_folder, root):
    config = ServeConfig.checked(lora_modules=f"{model_folder.name}={root}/mlp")
    with pytest.raises(ConfigError, match="base model's name"):
        base_names(config, model_folder)
