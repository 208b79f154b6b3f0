"""`GET /v1/models`."""

from __future__ import annotations

import pytest

from tests.serving.http.inside import client_of, serving


@pytest.fixture(scope="module")
def client(model_folder, adapter_folders):
    with serving(model_folder, adapter_folders) as state, client_of(state) as client:
        yield client


def test_base_and_adapters_are_models(client, model_folder, adapter_folders):
    listing = client.get("/v1/models").json()
    assert listing["object"] == "list"
    cards = {card["id"]: card for card in listing["data"]}
    assert list(cards) == [model_folder.name, *adapter_folders]
    base = cards[model_folder.name]
    assert (base["parent"], base["max_model_len"], base["object"]) == (None, 1024, "model")
    for name, folder in adapter_folders.items():
        assert cards[name]["root"] == str(folder)
        assert cards[name]["parent"] == model_folder.name
        assert client.get(f"/v1/models/{name}").json() == cards[name]
    assert client.get(f"/v1/models/{model_folder.name}").json() == base


def test_unknown_models(client):
    response = client.get("/v1/models/some/body")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["param"] == "model"
    assert "`some/body`" in error["message"]


def test_other_paths_and_methods_are_told_in_the_same_shape(client):
    assert client.get("/v1/nothing").json()["error"]["type"] == "NotFoundError"
    wrong = client.delete("/v1/models")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, 405)
