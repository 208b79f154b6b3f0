"""Adapters come and go while 64 streams run."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

import branchline
from tests.models import save_adapter
from tests.serving.http.conftest import RunningServer, ServerStarter

STREAMS = 64
TOKENS = 24
NAMES = ["attn", "mlp", "all", None]


def texts() -> list[str]:
    return [f"Request {i} asks for " + "something " * (i % 5) for i in range(STREAMS)]


@pytest.fixture(scope="module")
def library(model_folder: Path, adapter_folders) -> branchline.ServedModel:
    """The same model and adapters, wrapped here, with the tokenizer."""
    served = branchline.wrap(branchline.load_model(model_folder), max_loras=4)
    for name, folder in adapter_folders.items():
        served.adapters.load(name, folder)
    served.tokenizer = AutoTokenizer.from_pretrained(model_folder)
    return served


def is_greedy(served, name: str | None, answer: dict) -> bool:
    """Whether every token is the library's likeliest, or has a logit within the tolerance of it."""
    prompt, ids = served.tokenizer(answer["asked"])["input_ids"], answer["ids"]
    logits = served(torch.tensor([prompt + ids]), adapter_names=[name], use_cache=False).logits
    logits = logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    # See tests/serving/engine/test_answers.py.
    return bool((logits.amax(-1) - chosen).max() <= 0.08 * logits.abs().max())


async def stream(client: httpx.AsyncClient, model: str, text: str) -> dict:
    """One streamed completion: its status, tokens by id, and its end."""
    body = {
        "model": model,
        "prompt": text,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    found = {"asked": text, "status": 0, "ids": [], "finish": None, "error": None}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        found["status"] = response.status_code
        if response.status_code != 200:
            found["error"] = json.loads(await response.aread())["error"]
            return found
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                found["error"] = event["error"]
                continue
            choice = event["choices"][0]
            found["ids"] += choice.get("token_ids") or []
            found["finish"] = choice["finish_reason"] or found["finish"]
    return found


def client_of(server: RunningServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=STREAMS + 8)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


def test_mixed_load_answers_as_the_library_does_alone(server, library):
    async def run() -> list[dict]:
        async with client_of(server) as client:
            return await asyncio.gather(
                *(
                    stream(client, NAMES[i % 4] or server.model, text)
                    for i, text in enumerate(texts())
                )
            )

    answers = asyncio.run(run())
    for i, answer in enumerate(answers):
        assert (answer["status"], answer["finish"], answer["error"]) == (200, "length", None)
        assert len(answer["ids"]) == TOKENS
        assert is_greedy(library, NAMES[i % 4], answer), (NAMES[i % 4], answer)


def test_load_swap_and_unload_under_64_streams(
    start_server: ServerStarter, adapter_folders, model_folder, library
):
    root = next(iter(adapter_folders.values())).parent
    newer = root / "newer"
    if not newer.exists():
        save_adapter(
            branchline.load_model(model_folder), newer, ["q_proj", "o_proj"], rank=8, seed=9
        )
    library.adapters.load("newer", newer)
    server = start_server("--allow-runtime-lora-updating", "--allowed-roots", str(root))
    answers: list[dict] = []
    # Between these two moments the name went.
    unload_asked, unloaded = [], []

    async def run() -> None:
        async with client_of(server) as client:
            stop = asyncio.Event()

            async def ask(worker: int) -> None:
                turn = 0
                while not stop.is_set():
                    name = ["attn", "mlp", "all", server.model][(worker + turn) % 4]
                    asked_at = time.monotonic()
                    answer = await stream(client, name, texts()[worker])
                    told = {"asked_at": asked_at, "told_at": time.monotonic()}
                    answers.append({**answer, **told, "name": name})
                    turn += 1

            workers = [asyncio.create_task(ask(i)) for i in range(STREAMS)]
            load = "/v1/load_lora_adapter"
            for turn in range(6):
                await asyncio.sleep(0.3)
                source = newer if turn % 2 == 0 else adapter_folders["attn"]
                body = {"lora_name": "attn", "lora_path": str(source), "load_inplace": True}
                assert (await client.post(load, json=body)).status_code == 200
                extra = {"lora_name": f"extra-{turn}", "lora_path": str(newer)}
                assert (await client.post(load, json=extra)).status_code == 200
            unload = {"lora_name": "mlp"}
            unload_asked.append(time.monotonic())
            assert (await client.post("/v1/unload_lora_adapter", json=unload)).status_code == 200
            unloaded.append(time.monotonic())
            await asyncio.sleep(0.5)
            stop.set()
            await asyncio.gather(*workers)

    asyncio.run(run())
    assert len(answers) >= STREAMS
    of_swapped = {}
    for answer in answers:
        if answer["name"] == "mlp" and answer["asked_at"] > unloaded[0]:
            assert answer["status"] == 404, answer
        if answer["name"] == "mlp" and answer["status"] == 404:
            assert answer["told_at"] > unload_asked[0]
            continue
        assert (answer["status"], answer["error"]) == (200, None), answer
        if answer["name"] != "attn":
            continue
        of_swapped[answer["asked"], tuple(answer["ids"])] = answer
    assert of_swapped
    for answer in of_swapped.values():
        # Wholly from one version: its tokens are greedy under the old or under the new one.
        assert any(is_greedy(library, version, answer) for version in ("attn", "newer")), answer
