"""The command line of the server, as far as the moment at which it would serve."""

from __future__ import annotations

import logging
import re
import shutil
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from branchline.cli import app
from branchline.cli.options import flag_name
from branchline.cli.serve import _FLAGS_OF_VLLM
from branchline.serving.http.logs import ROOT_LOGGER
from branchline.serving.serve_config import ServeConfig


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch):
    for variable in ("BRANCHLINE_PORT", "VLLM_API_KEY", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """What the server was started with: configuration, loader, names."""
    calls: list[tuple[Any, Any, Any]] = []
    monkeypatch.setattr(
        "branchline.serving.http.server.run_server", lambda *given: calls.append(given)
    )
    return calls


@pytest.fixture
def _loggers() -> Iterator[None]:
    """As they were before a server configured them."""
    found = [logging.getLogger(name) for name in (ROOT_LOGGER, "uvicorn")]
    before = [(log.handlers, log.propagate, log.level) for log in found]
    yield
    for log, (handlers, propagate, level) in zip(found, before, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def test_every_setting_is_a_flag(branchline):
    words = " ".join(branchline("serve", "--help").out.replace("│", " ").split())
    for name in ServeConfig.model_fields:
        assert flag_name(name) in words
    assert "--adapter" in words
    assert "ps" in words, "that keys on the command line are seen"


def test_flags_and_file_make_one_configuration(branchline, started, model_folder, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nmax-loras: 2\n")
    branchline("serve", model_folder, "--config", file, "--port", 3, "--api-key", "hunter2")
    ((config, _, names),) = started
    assert (config.port, config.max_loras, names) == (3, 2, (model_folder.name,))
    assert config.api_key[0].get_secret_value() == "hunter2"
    assert config.model_fields_set == {"port", "max_loras", "api_key"}


@pytest.mark.parametrize(
    "flags",
    [
        ["--adapter", "sql=S", "--adapter", "tone=T"],
        ["--lora-modules", "sql=S", "tone=T"],
        ["--lora-modules", "sql=S", '{"name": "tone", "path": "T"}', "--enable-lora"],
        ["--lora-modules", "sql=S", "--port", "0", "--adapter", "tone=T"],
    ],
)
@pytest.mark.parametrize("model_first", [True, False])
def test_adapters_are_named_in_vllm_s_ways_and_ours(
    branchline, started, model_folder, sql, tone, flags, model_first
):
    given = [flag.replace("S", str(sql)).replace("T", str(tone)) for flag in flags]
    done = branchline("serve", *([model_folder, *given] if model_first else [*given, model_folder]))
    assert done.code == 0, done.err
    ((config, loader, _),) = started
    assert [(m.name, m.path) for m in config.modules] == [("sql", str(sql)), ("tone", str(tone))]
    if flags[0] == "--lora-modules" and model_first:
        loaded = loader()
        assert [info.name for info in loaded.served.adapters.list()] == ["sql", "tone"]
        assert loaded.tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], ["--port", "70000"]),
        (["--trust-remote-code"], ["never run"]),
        (["--enable-lora", "--max-loras", "0"], ["--enable-lora", "--max-loras 0"]),
        (["--adapter", "sql"], ["--lora-modules", "NAME=SOURCE"]),
        (["--adapter", "sql=a", "--adapter", "sql=b"], ["sql twice"]),
        (["--allow-runtime-lora-updating"], ["allowed_roots"]),
        (["--config", "nix.yaml"], ["nix.yaml", "cannot be read"]),
        (["--served-model-name", "sql", "--adapter", "sql=a"], ["base model's name"]),
        (["--calibration", "scales.json"], ["--calibration", "fp8-dynamic"]),
        (["extra=argument"], ["extra=argument"]),
    ],
)
def test_what_cannot_work_is_a_usage_error(branchline, started, model_folder, flags, said):
    done = branchline("serve", model_folder, *flags)
    assert done.code == 2
    assert not done.out
    for part in said:
        assert part in done.err
    assert not started


@pytest.mark.usefixtures("_loggers")
def test_an_address_that_is_taken_is_an_error(branchline, model_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = branchline("serve", model_folder, "--port", port)
    assert f"127.0.0.1:{port}" in done.error
    assert "--port" in done.error


@pytest.mark.usefixtures("_loggers")
def test_a_server_whose_adapter_cannot_be_loaded_does_not_start(
    branchline, model_folder, sql, tmp_path
):
    folder = shutil.copytree(sql, tmp_path / "sql")
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 9)
    done = branchline("serve", model_folder, "--port", 0, "--adapter", f"sql={folder}")
    assert "adapter_model.safetensors" in done.error
    assert "listening on http://127.0.0.1:" in done.err
    assert " ready on " not in done.err


@pytest.mark.parametrize("command", [["serve"], ["audit", "--load"]], ids=" ".join)
@pytest.mark.parametrize(
    ("source", "said"),
    [("nowhere", "no such folder"), ("empty", "adapter_config.json"), ("", "adapter_config.json")],
)
def test_a_path_without_an_adapter_is_refused_before_the_model_is_loaded(
    branchline, started, model_folder, tmp_path, command, source, said
):
    (tmp_path / "empty").mkdir()
    done = branchline(*command, model_folder, "--adapter", f"sql={tmp_path / source}")
    assert said in done.error
    assert "loading" not in done.err
    assert not started


# --- flags of vLLM -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named", "said"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size", "--ray-replicas"),
        (["-tp", "2"], "-tp", "--ray-replicas"),
        (["--gpu-memory-utilization=0.9"], "--gpu-memory-utilization", "--kv-cache-memory-bytes"),
        (["--gpu_memory_utilization", "0.9"], "--gpu_memory_utilization", "--kv-cache"),
        (["--dtype", "bfloat16"], "--dtype", "--quant"),
        (["--quantization", "fp8"], "--quantization", "use --quant"),
        (["--enforce-eager"], "--enforce-eager", "leave it out"),
    ],
)
def test_a_flag_of_vllm_is_refused_with_what_to_do(
    branchline, started, model_folder, flags, named, said
):
    done = branchline("serve", model_folder, *flags)
    assert done.code == 2
    assert f"Invalid value for {named}:" in done.err
    assert said in done.err
    assert not started


def test_a_flag_that_nobody_has_is_refused_as_ever(branchline, started, model_folder):
    done = branchline("serve", model_folder, "--frobnicate")
    assert done.code == 2
    assert "No such option" in done.err
    assert "vLLM" not in done.err


def test_no_flag_of_our_own_is_called_vllm_s():
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, "serve")
    own = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    assert not own & _FLAGS_OF_VLLM.keys()
    # What they say to use there is.
    for flag, reason in _FLAGS_OF_VLLM.items():
        for named in re.findall(r"--[a-z-]+", reason):
            assert named in own, flag
