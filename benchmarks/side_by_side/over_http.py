"""Servers that speak OpenAI's completions: started, loaded with all requests at once, ended."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

_READY_SECONDS, _ANSWER_SECONDS = 300, 300


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def measure(
    command: Sequence[str], port: int, spec: dict[str, Any], base: str, log: Path
) -> dict[str, Any]:
    """Seconds and tokens of a server.

    Args:
        command: that starts it.
        port: that it was told.
        spec: prompts, names, tokens, rounds, threads.
        base: the model's name in requests without an adapter.
        log: its output.

    Raises:
        RuntimeError: it ended, was not ready in time, or gave other numbers of tokens.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"])}
    with log.open("w", encoding="utf-8") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, {"model": base, "prompt": spec["prompts"][0]}, log)
            seconds, tokens = asyncio.run(_rounds(url, spec, base))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return {"seconds": seconds, "tokens": tokens}


def _wait(process: subprocess.Popen[bytes], url: str, asked: dict[str, str], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        try:
            # A server may listen before it serves: it is asked for one token.  Of a prompt like the
            # others: vLLM's CPU build dies where its first prompt is one token long and there is
            # AMX, which only larger matrix products ask the system for.
            body = {**asked, "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            if answer.status_code == 200:
                return
            if answer.status_code < 500:
                raise RuntimeError(f"the server refuses a completion: {answer.text}; see {log}")
            time.sleep(0.2)
        except httpx.TransportError:
            # Nobody listens yet.
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready in {_READY_SECONDS} s; see {log}")


async def _rounds(url: str, spec: dict[str, Any], base: str) -> tuple[float, int]:
    seconds, tokens = [], 0
    wanted = len(spec["prompts"]) * spec["tokens"]
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_SECONDS) as client:
        for turn in range(spec["rounds"] + 1):
            begun = time.perf_counter()
            answers = await asyncio.gather(
                *(
                    _answer(client, name or base, prompt, spec)
                    for prompt, name in zip(spec["prompts"], spec["names"], strict=True)
                )
            )
            if turn:
                seconds.append(time.perf_counter() - begun)
            tokens = sum(answers)
            if tokens != wanted:
                raise RuntimeError(f"{tokens} tokens instead of {wanted}: not the same work")
    return statistics.median(seconds), tokens


async def _answer(client: httpx.AsyncClient, model: str, prompt: str, spec: dict[str, Any]) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": spec["tokens"], "temperature": 0}
    body |= spec["body"]
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    return response.json()["usage"]["completion_tokens"]
