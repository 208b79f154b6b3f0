"""A fleet of two replicas on a local Ray: one endpoint, one table of adapters."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from branchline.serving.ray import FleetConfig, build
from branchline.serving.ray.asgi import Forwarded
from tests.serving.http.conftest import (  # noqa: F401
    adapter_folders,
    model_folder,
)

# A replica that comes later imports torch, on a machine that may be busy with other tests.
WAIT_SECONDS = 300.0


@dataclass
class RunningFleet:
    """A fleet and its address."""

    url: str
    model: str
    root: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def adapters(self) -> dict[str, dict[str, dict]]:
        """Lines of the listing, by replica and name."""
        listing = httpx.get(f"{self.url}/v1/adapters", timeout=60.0).json()
        found: dict[str, dict[str, dict]] = {name: {} for name in listing["replicas"]}
        for line in listing["data"]:
            found[line["replica"]][line["name"]] = line
        return found

    def load(self, name: str, source: Path | str, **more: object) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(source), **more}
        return httpx.post(f"{self.url}/v1/load_lora_adapter", json=body, timeout=60.0)

    def unload(self, name: str) -> httpx.Response:
        body = {"lora_name": name}
        return httpx.post(f"{self.url}/v1/unload_lora_adapter", json=body, timeout=60.0)

    def complete(self, model: str, tokens: int = 4) -> httpx.Response:
        body = {"model": model, "prompt": "one two", "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60.0)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {serve.status()}"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def fleet(
    model_folder: Path,  # noqa: F811
    adapter_folders: Mapping[str, Path],  # noqa: F811
) -> Iterator[RunningFleet]:
    root = adapter_folders["attn"].parent
    config = FleetConfig(
        model=model_folder,
        quant="fp8-dynamic",
        lora_modules=(f"attn={adapter_folders['attn']}", f"mlp={adapter_folders['mlp']}"),
        allow_runtime_lora_updating=True,
        allowed_roots=(str(root),),
        max_loras=4,
        shutdown_timeout=5.0,
        ray=True,
        ray_replicas=2,
        ray_cpus=0.5,
    )
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(build(config), name="branchline", route_prefix="/")
        yield RunningFleet(f"http://127.0.0.1:{port}", model_folder.name, root)
    finally:
        serve.shutdown()
        ray.shutdown()


# --- requests ------------------------------------------------------------------------------------


def test_openai_client_is_answered_through_the_endpoint(fleet: RunningFleet):
    client = fleet.openai()
    names = [card.id for card in client.models.list()]
    assert names == [fleet.model, "attn", "mlp"]
    texts = {
        name: client.completions.create(
            model=name, prompt="one two three", max_tokens=8, temperature=0
        )
        .choices[0]
        .text
        for name in names
    }
    assert len(set(texts.values())) == 3


def test_stream_comes_in_pieces_and_adds_up(fleet: RunningFleet):
    client = fleet.openai()
    asked = {"model": "attn", "prompt": "one two", "max_tokens": 64, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert len(chunks) > 4
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_headers_and_request_id_come_back_once(fleet: RunningFleet):
    with fleet.client() as client:
        answer = client.get("/v1/models", headers={"X-Request-Id": "of-the-test"})
    assert answer.headers.get_list("x-request-id") == ["of-the-test"]
    assert answer.headers["content-type"] == "application/json"


def test_unknown_model_is_refused(fleet: RunningFleet):
    answer = fleet.complete("nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"


def test_malformed_requests_are_refused_as_by_one_server(fleet: RunningFleet):
    with fleet.client() as client:
        json_type = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=b"{", headers=json_type).status_code == 400
        assert client.post("/v1/load_lora_adapter", json={"lora_name": 3}).status_code == 400
        assert client.get("/nowhere").status_code == 404
        assert client.get("/adapters").status_code == 405


def test_requests_of_one_adapter_go_where_it_is_in_use(fleet: RunningFleet):
    def hits() -> Counter[str]:
        lines = fleet.adapters()
        return Counter({name: lines[name]["mlp"]["hits"] for name in lines})

    def replicas_of(requests: int) -> int:
        before = hits()
        for _ in range(requests):
            assert fleet.complete("mlp", tokens=1).status_code == 200
        grown = hits() - before
        assert sum(grown.values()) >= requests
        return len(grown)

    # Replicas tell the routers every now and then what they have in use. By chance, ten requests
    # go to one of two replicas in one case of five hundred.
    for _ in range(5):
        if replicas_of(10) == 1:
            return
        time.sleep(2.0)
    pytest.fail("requests of one adapter go to both replicas")


def test_leaving_client_ends_its_request(fleet: RunningFleet):
    body = {"model": "attn", "prompt": "one", "max_tokens": 900, "ignore_eos": True, "stream": True}

    def cancelled() -> float:
        text = httpx.get(f"{fleet.url}/metrics", timeout=60.0).text
        lines = [x for x in text.splitlines() if x.startswith("branchline_requests_total{")]
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if 'outcome="cancelled"' in x)

    before = cancelled()
    with fleet.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert b"data:" in next(answer.iter_bytes())
    wait_for(lambda: cancelled() == before + 1, "the request goes on")


# --- all replicas --------------------------------------------------------------------------------


def test_every_replica_is_ready_and_counted(fleet: RunningFleet):
    with fleet.client() as client:
        assert client.get("/ready").json()["replicas"] == 2
        assert client.get("/health").status_code == 200
        text = client.get("/metrics").text
    assert "\nbranchline_replicas 2\n" in text
    assert len(fleet.adapters()) == 2


def test_load_and_unload_reach_every_replica(
    fleet: RunningFleet,
    adapter_folders: Mapping[str, Path],  # noqa: F811
):
    assert fleet.load("late", adapter_folders["all"]).status_code == 200
    lines = fleet.adapters()
    assert len({lines[replica]["late"]["digest"] for replica in lines}) == 1
    assert all("late" in names for names in lines.values())
    assert fleet.complete("late").status_code == 200
    again = fleet.load("late", adapter_folders["mlp"])
    assert again.status_code == 400
    swapped = fleet.load("late", adapter_folders["mlp"], load_inplace=True)
    assert swapped.status_code == 200
    lines = fleet.adapters()
    assert all(names["late"]["digest"] == names["mlp"]["digest"] for names in lines.values())
    assert fleet.unload("late").status_code == 200
    assert all("late" not in names for names in fleet.adapters().values())
    assert fleet.complete("late").status_code == 404
    assert fleet.unload("late").status_code == 404


def test_bad_adapter_is_loaded_nowhere(fleet: RunningFleet):
    before = fleet.adapters()
    bad = fleet.root / "bad"
    bad.mkdir()
    (bad / "adapter_config.json").write_text("{}")
    answer = fleet.load("bad", bad)
    assert answer.status_code == 400
    assert "bad" in answer.json()["error"]["message"]
    assert {r: set(names) for r, names in fleet.adapters().items()} == {
        r: set(names) for r, names in before.items()
    }


def test_what_one_replica_refuses_is_undone_at_the_others(
    fleet: RunningFleet,
    adapter_folders: Mapping[str, Path],  # noqa: F811
):
    """One replica alone knows the name already, so that it alone refuses to load it."""
    handle = serve.get_deployment_handle("branchline-replica", "branchline")
    body = {"lora_name": "odd", "lora_path": str(adapter_folders["all"])}
    head = ((b"content-type", b"application/json"),)
    load = Forwarded("POST", "/v1/load_lora_adapter", headers=head, body=json.dumps(body).encode())
    alone = handle.ask.remote(load).result()
    assert alone.reply.ok
    answer = fleet.load("odd", adapter_folders["all"])
    assert answer.status_code == 400
    assert "odd" in answer.json()["error"]["message"]
    lines = fleet.adapters()
    assert len(lines) == 2
    # The table has no such adapter, so that nobody has.
    assert all("odd" not in names for names in lines.values())


# --- replicas that come later: last, since one is killed -----------------------------------------


def test_killed_replica_is_replaced_with_the_adapters(
    fleet: RunningFleet,
    adapter_folders: Mapping[str, Path],  # noqa: F811
):
    assert fleet.load("kept", adapter_folders["all"]).status_code == 200
    assert fleet.unload("mlp").status_code == 200
    before = fleet.adapters()
    digest = next(iter(before.values()))["kept"]["digest"]
    (victim, *_) = before
    actors = ray.util.list_named_actors(all_namespaces=True)
    (actor,) = [found for found in actors if found["name"].endswith(victim)]
    ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
    for _ in range(6):
        assert fleet.complete("kept").status_code == 200

    def replaced() -> bool:
        lines = fleet.adapters()
        return len(lines) == 2 and lines.keys() != before.keys()

    wait_for(replaced, "no new replica")
    lines = fleet.adapters()
    assert all(set(names) == {"attn", "kept"} for names in lines.values())
    assert {names["kept"]["digest"] for names in lines.values()} == {digest}
    for _ in range(4):
        assert fleet.complete("mlp").status_code == 404
        assert fleet.complete("kept").status_code == 200
