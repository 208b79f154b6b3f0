"""Server processes of a tiny random model with a tokenizer, a chat template and three adapters."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import make_tokenizer
from tests.models import save_adapter

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ADDRESS = re.compile(r"listening on (http://\S+?)[\s\",]")
# Starting imports torch, on a machine that may be busy with other tests.
START_SECONDS = 600.0


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder; its name is the base model's name."""
    special = ("<|system|>", "<|user|>", "<|assistant|>")
    tokenizer = make_tokenizer(*special, chat_template=CHAT_TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                # Large enough that another adapter makes other tokens.
                parameter.normal_(std=0.08)
    folder = tmp_path_factory.mktemp("served") / "tiny-llama"
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter_folders(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Three adapters that PEFT saved, all in one folder (an allowed root)."""
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    root = tmp_path_factory.mktemp("adapters")
    targets = {"attn": ["q_proj", "v_proj"], "mlp": ["gate_proj", "down_proj"], "all": "all-linear"}
    return {
        name: save_adapter(model, root / name, modules, rank=4 * (seed + 1), seed=seed)
        for seed, (name, modules) in enumerate(targets.items())
    }


@dataclass
class Address:
    """Where a server listens.

    Attributes:
        url: without a slash at the end.
        model: the base model's name.
    """

    url: str
    model: str

    def client(self, **settings) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, **settings)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Until `condition`; fails if it takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: timed out"
            time.sleep(0.02)


@dataclass
class RunningServer(Address):
    """One `branchline serve` process.

    Attributes:
        process: itself.
        adapters: folders of the adapters that were loaded at start, by name.
        lines: what it wrote to stderr so far.
    """

    process: subprocess.Popen[str]
    adapters: Mapping[str, Path]
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Until `condition`; fails with the log if the process ends or it takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > deadline:
                how = "timed out" if ended is None else f"ended with {ended}"
                raise AssertionError(f"{what}: {how}\n{self.log}")
            time.sleep(0.02)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=10.0).status_code == 200
        except httpx.ConnectError:
            # It has ended, of which its log tells more.
            return False

    def stop(self, by: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Signal it, and give back its exit code."""
        self.process.send_signal(by)
        return self.process.wait(seconds)


ServerStarter = Callable[..., RunningServer]


def starter(
    model_folder: Path, adapter_folders: Mapping[str, Path], made: list[RunningServer]
) -> ServerStarter:
    """What starts servers, and adds them to `made`; see `end`."""

    def start(
        *flags: str, adapters: bool = True, ready: bool = True, env: Mapping[str, str] | None = None
    ) -> RunningServer:
        loaded = adapter_folders if adapters else {}
        command = [sys.executable, "-m", "branchline", "serve", str(model_folder), "--port", "0"]
        for name, folder in loaded.items():
            command += ["--adapter", f"{name}={folder}"]
        process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        server = RunningServer("", model_folder.name, process, loaded)
        made.append(server)
        assert process.stderr is not None
        reader = threading.Thread(target=server.lines.extend, args=(process.stderr,), daemon=True)
        reader.start()
        server.wait_for(lambda: bool(ADDRESS.search(server.log)), "no address", START_SECONDS)
        found = ADDRESS.search(server.log)
        assert found is not None
        server.url = found[1]
        if ready:
            server.wait_for(server.is_ready, "not ready", START_SECONDS)
        return server

    return start


def end(made: list[RunningServer]) -> None:
    """End them, whatever they do."""
    for server in made:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(30)
        if server.process.stderr is not None:
            server.process.stderr.close()


@pytest.fixture
def start_server(model_folder: Path, adapter_folders: dict[str, Path]) -> Iterator[ServerStarter]:
    """Start servers of one's own: `start_server("--max-num-seqs", "2", env={...})`."""
    made: list[RunningServer] = []
    yield starter(model_folder, adapter_folders, made)
    end(made)


@pytest.fixture(scope="session")
def server(model_folder: Path, adapter_folders: dict[str, Path]) -> Iterator[RunningServer]:
    """One server that tests share: adapters may be loaded and unloaded at run time, no keys."""
    made: list[RunningServer] = []
    root = next(iter(adapter_folders.values())).parent
    start = starter(model_folder, adapter_folders, made)
    yield start("--allow-runtime-lora-updating", "--allowed-roots", str(root))
    end(made)
