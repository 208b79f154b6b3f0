"""A server process under load: start, throughput by HTTP, and token gaps while adapters load.

``python -m benchmarks.serving.loading MODEL ADAPTER... [--short]``: folders of a model and of
adapters for it (the demo's: ``python examples/smollm2.py`` prints the model's).  16 streams run all
the time; the gaps between their events are compared with and without an adapter that is loaded,
swapped and unloaded in a loop beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.harness import THREADS, say

STREAMS, TOKENS = 16, 64


class Server:
    """One `branchline serve` process."""

    def __init__(self, model: Path, adapters: Sequence[Path], *flags: str) -> None:
        self.model = model.name
        self.names = [f"adapter{index}" for index in range(len(adapters))]
        command = [sys.executable, "-m", "branchline", "serve", str(model), "--port", "0", *flags]
        for name, folder in zip(self.names, adapters, strict=True):
            command += ["--adapter", f"{name}={folder}"]
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
        )
        self.url = self._read(r"listening on (http://\S+)")
        self._read(r"ready on")
        self.seconds_to_ready = time.perf_counter() - begun

    def _read(self, pattern: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(pattern, line)
            if found:
                return found[found.re.groups]
        raise RuntimeError(f"the server ended with {self.process.wait()}")

    def drain(self) -> None:
        """Read its log in the background, so that it never waits for a reader."""
        subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


async def stream(client: httpx.AsyncClient, model: str, prompt: str, gaps: list[float]) -> int:
    """One streamed answer; seconds between its events go into `gaps`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    events, last = 0, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if "error" in json.loads(line.removeprefix("data: ")):
                raise RuntimeError(line)
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last, events = now, events + 1
    return events


async def rounds(server: Server, names: Sequence[str], seconds: float) -> tuple[float, list[float]]:
    """Tokens a second, and gaps, of streams that follow one another."""
    gaps: list[float] = []
    tokens = 0
    begun = time.perf_counter()

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def worker(number: int) -> None:
            nonlocal tokens
            turn = 0
            while time.perf_counter() - begun < seconds:
                prompt = f"Request {number}.{turn}: tell me something about trains."
                tokens += await stream(client, names[number % len(names)], prompt, gaps)
                turn += 1

        await asyncio.gather(*(worker(number) for number in range(STREAMS)))
    return tokens / (time.perf_counter() - begun), gaps


async def churn(server: Server, folder: Path, until: asyncio.Event) -> int:
    """Load and unload one more adapter in a loop; how many times."""
    times = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        while not until.is_set():
            name = f"extra{times}"
            for path, body in (
                ("load", {"lora_name": name, "lora_path": str(folder)}),
                ("unload", {"lora_name": name}),
            ):
                response = await client.post(f"/v1/{path}_lora_adapter", json=body)
                response.raise_for_status()
            times += 1
            await asyncio.sleep(0.2)
    return times


async def loaded(server: Server, folder: Path, seconds: float) -> tuple[int, list[float]]:
    """How often it was loaded, and the gaps meanwhile."""
    done = asyncio.Event()
    task = asyncio.create_task(churn(server, folder, done))
    _, gaps = await rounds(server, server.names, seconds)
    done.set()
    return await task, gaps


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def run(model: Path, adapters: Sequence[Path], short: bool) -> None:
    """Measure one server."""
    roots = str(adapters[0].parent)
    server = Server(
        model, adapters, "--allow-runtime-lora-updating", "--allowed-roots", roots,
        "--max-loras", str(len(adapters) + 1), "--log-level", "warning",
    )  # fmt: skip
    server.drain()
    try:
        say(f"start to ready: {server.seconds_to_ready:.1f} s, {THREADS} threads")
        seconds = 3.0 if short else 15.0
        asyncio.run(rounds(server, [server.model], 2.0))
        for label, names in (("base", [server.model]), ("all adapters", server.names)):
            rate, gaps = asyncio.run(rounds(server, names, seconds))
            say(f"{label}: {rate:.0f} tokens/s, gap median {percentile(gaps, 0.5) * 1e3:.0f} ms")
        quiet: list[float] = []
        busy: list[float] = []
        times = 0
        for _ in range(1 if short else 3):
            quiet += asyncio.run(rounds(server, server.names, seconds))[1]
            more, gaps = asyncio.run(loaded(server, adapters[0], seconds))
            busy += gaps
            times += more
        before, after = percentile(quiet, 0.99), percentile(busy, 0.99)
        say(
            f"p99 of token gaps: {before * 1e3:.0f} ms, {after * 1e3:.0f} ms while adapters were "
            f"loaded {times} times: {after / before:.2f} times"
        )
    finally:
        server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path, nargs="+")
    parser.add_argument("--short", action="store_true", help="a few seconds of each")
    arguments = parser.parse_args()
    run(arguments.model, arguments.adapters, arguments.short)
