"""The parts of a fleet, without Ray running: requests as values, the table, its changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import Result
from ray import cloudpickle
from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle
from typer.testing import CliRunner

from branchline import ServedModel, load_model, wrap
from branchline.cli import app
from branchline.core.errors import AdapterNotFoundError, ConfigError
from branchline.linear.kernels.float_selection import FloatKernel
from branchline.serving.http.state import ServerState
from branchline.serving.ray import FleetConfig, build, loader
from branchline.serving.ray.asgi import Forwarded, Head, Reply, replied
from branchline.serving.ray.fleet import Fleet
from branchline.serving.ray.merge import merged_metrics
from branchline.serving.ray.replica import Answered, take_over
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


def test_a_replica_checks_the_routes_of_what_came_by_the_table(
    served: ServedModel,
    adapter_folders: Mapping[str, Path],  # noqa: F811
):
    checked: list[str] = []
    state = cast(
        ServerState, SimpleNamespace(served=served, checks=SimpleNamespace(loaded=checked.append))
    )
    first = {name: Entry(str(adapter_folders[name])) for name in ("attn", "mlp")}
    assert take_over(state, Table(0, first)) == {}
    assert checked == ["attn", "mlp"]
    digests = {info.name: info.digest for info in served.adapters.list()}
    settled = Table(0, first).settled(digests)
    assert take_over(state, settled) == {}
    assert checked == ["attn", "mlp"]
    swapped = settled.changed(Change("mlp", str(adapter_folders["all"])), "")
    assert take_over(state, swapped) == {}
    assert checked == ["attn", "mlp", "mlp"]
    assert take_over(state, Table(9)) == {}
    assert len(checked) == 3


def test_a_replica_has_a_server_s_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Of what the command line serves in one process, nothing is lost in many."""
    given = {}
    for name in ("load_model", "load_tokenizer"):
        monkeypatch.setattr(loader, name, lambda folder: folder)
    monkeypatch.setattr(loader, "wrap", lambda model, **settings: given.update(settings))
    config = FleetConfig(model=tmp_path, ray=True, max_loras=3)
    loader.FolderLoader(config)()
    assert given == {"calibration": None, "float_kernel": FloatKernel.AUTO, "max_loras": 3}


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
