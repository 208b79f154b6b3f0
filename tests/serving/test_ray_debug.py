"""A fleet of two replicas on a local Ray: one endpoint, one table of adapters."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import openai
import pytest
import ray
from click.testing import Result
from ray import cloudpickle, serve
from ray.exceptions import ActorDiedError
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentHandle
from typer.testing import CliRunner

from branchline import ServedModel, load_model, wrap
from branchline.cli import app
from branchline.core.errors import AdapterNotFoundError, ConfigError
from branchline.serving.ray import FleetConfig, build
from branchline.serving.ray.asgi import Forwarded, Head, Reply, replied
from branchline.serving.ray.fleet import Fleet
from branchline.serving.ray.merge import merged_metrics
from branchline.serving.ray.replica import Answered
from branchline.serving.ray.table import (
    Change,
    Entry,
    Table,
    change_of,
    follow,
    is_change,
    model_of,
)
from tests.serving.http.conftest import (  # noqa: F401
    adapter_folders,
    model_folder,
)

WAIT_SECONDS = 90.0


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
    asked = {"model": "attn", "prompt": "one two", "max_tokens": 12, "temperature": 0}
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

    fleet.complete("mlp")
    # Replicas tell the routers every now and then what they have in use.
    time.sleep(2.0)
    before = hits()
    for _ in range(6):
        assert fleet.complete("mlp", tokens=1).status_code == 200
    grown = hits() - before
    assert len(grown) == 1
    assert sum(grown.values()) >= 6


def test_leaving_client_ends_its_request(fleet: RunningFleet):
    body = {"model": "attn", "prompt": "one", "max_tokens": 900, "ignore_eos": True, "stream": True}

    def running() -> float:
        text = httpx.get(f"{fleet.url}/metrics", timeout=60.0).text
        lines = [x for x in text.splitlines() if x.startswith("vllm:num_requests_running{")]
        assert len(lines) == 2
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    with fleet.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_bytes()
        started = time.monotonic()
        first = next(pieces)
        print("FIRST", time.monotonic() - started, first[:200])
        r = running()
        print("RUN", r, time.monotonic() - started)
        n = 0
        for p in pieces:
            n += 1
            if n % 50 == 0: print(n, time.monotonic() - started)
        print(n, p[-200:])
        assert r == 1
    wait_for(lambda: running() == 0, "the request goes on")


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


# --- parts ---------------------------------------------------------------------------------------


def forwarded(method: str, path: str, body: object = None) -> Forwarded:
    content = b"" if body is None else json.dumps(body).encode()
    return Forwarded(method, path, body=content)


@pytest.mark.parametrize(
    ("request_", "change"),
    [
        (
            forwarded("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "x"}),
            Change("a", "x"),
        ),
        (forwarded("POST", "/adapters", {"name": "a", "src": "x"}), Change("a", "x")),
        (forwarded("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}), Change("a", None)),
        (forwarded("DELETE", "/adapters/a/b"), Change("a/b", None)),
        (forwarded("POST", "/v1/load_lora_adapter", {"lora_name": "a"}), None),
        (forwarded("POST", "/adapters", ["name"]), None),
        (forwarded("POST", "/v1/unload_lora_adapter"), None),
    ],
)
def test_what_a_request_changes(request_: Forwarded, change: Change | None):
    assert is_change(request_)
    assert change_of(request_) == change


def test_model_that_a_request_names():
    assert model_of(forwarded("POST", "/v1/completions", {"model": "sql"})) == "sql"
    assert model_of(forwarded("GET", "/v1/models/a")) == "a"
    for other in (
        forwarded("POST", "/v1/completions", {"model": 3}),
        forwarded("POST", "/v1/completions"),
        forwarded("GET", "/v1/models"),
    ):
        assert model_of(other) is None
        assert not is_change(other)


def test_table_changes_by_generation():
    table = Table(0, {"a": Entry("x")})
    settled = table.settled({"a": "1", "b": "2"})
    assert settled == Table(1, {"a": Entry("x", "1")})
    # Whoever comes second finds the digest of the first.
    assert settled.settled({"a": "9"}) is settled
    assert settled.changed(Change("b", "y"), "2").entries.keys() == {"a", "b"}
    assert settled.changed(Change("a", None), "") == Table(2, {})


def test_metrics_of_all_are_grouped_by_family():
    def answered(replica: str, value: int) -> Answered:
        text = (
            "# HELP x_total What.\n# TYPE x_total counter\n"
            f'x_total{{a="b c"}} {value}\n# HELP y Why.\n# TYPE y gauge\ny {value}\n'
        )
        return Answered(replica, Reply(Head(200, ()), text.encode()), {})

    merged = merged_metrics([answered("one", 1), answered("two", 2)]).body.decode()
    assert merged.splitlines() == [
        "# HELP x_total What.",
        "# TYPE x_total counter",
        'x_total{replica="one",a="b c"} 1',
        'x_total{replica="two",a="b c"} 2',
        "# HELP y Why.",
        "# TYPE y gauge",
        'y{replica="one"} 1',
        'y{replica="two"} 2',
        "# HELP branchline_replicas Replicas that answered.",
        "# TYPE branchline_replicas gauge",
        "branchline_replicas 2",
    ]


def test_closing_a_reply_is_the_clients_leaving():
    left = []

    async def asked(scope, receive, send) -> None:
        assert (await receive())["body"] == b"asked"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        try:
            left.append((await receive())["type"])
        except asyncio.CancelledError:
            left.append("cancelled")
            raise

    async def run() -> list[object]:
        parts = replied(asked, Forwarded("POST", "/", body=b"asked"))
        got = [await anext(parts), await anext(parts)]
        await parts.aclose()
        return got

    assert asyncio.run(run()) == [Head(200, ((b"a", b"b"),)), b"1"]
    assert left in (["http.disconnect"], ["cancelled"])


@pytest.fixture(scope="module")
def served(model_folder: Path) -> ServedModel:  # noqa: F811
    return wrap(load_model(model_folder), quant="fp8-dynamic", max_loras=4)


def test_a_replica_follows_the_table(
    served: ServedModel,
    adapter_folders: Mapping[str, Path],  # noqa: F811
):
    adapters = served.adapters

    def loaded() -> dict[str, str]:
        return {info.name: info.digest for info in adapters.list()}

    first = {name: Entry(str(adapter_folders[name])) for name in ("attn", "mlp")}
    assert follow(adapters, Table(0, first)) == {}
    digests = loaded()
    settled = Table(0, first).settled(digests)
    hits = {info.name: info.hits for info in adapters.list()}
    assert follow(adapters, settled) == {}
    assert loaded() == digests
    assert {info.name: info.hits for info in adapters.list()} == hits
    # Another content under a name that is there, and a name that is gone.
    other = Entry(str(adapter_folders["mlp"]), digests["mlp"])
    assert follow(adapters, Table(2, {"attn": other})) == {}
    assert loaded() == {"attn": digests["mlp"]}


def test_a_content_that_is_not_the_tables_is_not_served(
    served: ServedModel,
    adapter_folders: Mapping[str, Path],  # noqa: F811
):
    entries = {
        "changed": Entry(str(adapter_folders["attn"]), "0123"),
        "gone": Entry(str(adapter_folders["attn"].parent / "gone"), "4567"),
    }
    missing = follow(served.adapters, Table(1, entries))
    assert missing.keys() == {"changed", "gone"}
    assert "another content" in missing["changed"]
    assert served.adapters.list() == ()
    with pytest.raises(AdapterNotFoundError):
        follow(served.adapters, Table(0, {"gone": Entry(entries["gone"].source)}))


class Replicas:
    """Stands for a handle: what each replica answers, or how it died."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers
        self.told: list[Table] = []

    def broadcast(self, method: str, argument: object) -> Replicas:
        if method == "take":
            assert isinstance(argument, Table)
            self.told.append(argument)
        return self

    async def results_async(self, **_: object) -> list[object]:
        return list(self.answers)


def answered_load(replica: str, status: int, digest: str) -> Answered:
    return Answered(replica, Reply(Head(status, ()), replica.encode()), {"a": digest})


LOAD = forwarded("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "x"})


def change(*answers: object) -> tuple[Reply, Table, list[Table]]:
    """The reply, the table afterwards, and the tables that replicas were told."""
    replicas = Replicas(*answers)

    async def run() -> tuple[Reply, Table]:
        fleet = Fleet(cast(DeploymentHandle, replicas), {"old": "y"}, 1.0)
        return await fleet.change(LOAD), await fleet.table()

    reply, table = asyncio.run(run())
    return reply, table, replicas.told


def test_what_all_replicas_did_is_entered():
    reply, table, told = change(answered_load("one", 200, "d"), answered_load("two", 200, "d"))
    assert (reply.head.status, reply.body) == (200, b"one")
    assert table == Table(1, {"old": Entry("y"), "a": Entry("x", "d")})
    assert told == [table]


def test_what_a_dead_replica_did_not_do_is_done():
    died = ActorDiedError()
    reply, table, _ = change(died, answered_load("two", 200, "d"))
    assert reply.ok
    assert "a" in table.entries


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ((answered_load("one", 200, "d"), answered_load("two", 400, "")), 400),
        ((answered_load("one", 200, "d"), answered_load("two", 200, "e")), 400),
        ((ActorDiedError(),), 503),
    ],
)
def test_what_not_all_did_is_undone(answers: tuple[object, ...], status: int):
    reply, table, told = change(*answers)
    before = Table(0, {"old": Entry("y")})
    assert reply.head.status == status
    assert table == before
    # Whoever did it is told the table of before.
    assert told == ([before] if len(answers) > 1 else [])


def test_restarted_fleet_takes_the_table_of_its_replicas():
    later = Table(7, {"a": Entry("x", "d")})

    async def run() -> list[Table | None]:
        fleet = Fleet(cast(DeploymentHandle, Replicas()), {}, 1.0)
        return [await fleet.agree(later), await fleet.agree(Table(3)), await fleet.table()]

    assert asyncio.run(run()) == [later, later, later]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, ["serve", *map(str, arguments)])


def test_command_deploys_a_fleet(
    command: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    model_folder: Path,  # noqa: F811
):
    calls = []
    monkeypatch.setattr("branchline.serving.ray.run.run_fleet", lambda *given: calls.append(given))
    ran = command(model_folder, "--ray", "--ray-replicas", 2, "--adapter", "a=x", "--max-loras", 3)
    assert ran.exit_code == 0, ran.output
    ((config, load),) = calls
    assert (config.ray_replicas, config.max_loras, config.model) == (2, 3, model_folder.resolve())
    assert [module.name for module in config.modules] == ["a"]
    # The table loads the adapters of the start, not each replica for itself.
    loaded = cloudpickle.loads(cloudpickle.dumps(load))()
    assert loaded.served.adapters.list() == ()


def test_command_refuses_what_has_no_effect(command: Callable[..., Result], tmp_path: Path):
    ran = command(tmp_path, "--ray-replicas", 2)
    assert ran.exit_code == 2
    assert "no effect without --ray" in ran.output


def test_settings_that_cannot_work_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="less than"):
        build({"model": tmp_path, "ray_replicas": 3, "ray_max_replicas": 2})
    with pytest.raises(ConfigError, match="static scales"):
        build({"model": tmp_path, "quant": "fp8-static"})
    with pytest.raises(ConfigError, match="base model's name"):
        build({"model": tmp_path, "lora_modules": [f"{tmp_path.name}=x"]})


def test_refused_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("branchline.serving.ray.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"branchline\[ray\]"):
        build({"model": tmp_path})
