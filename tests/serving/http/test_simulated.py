"""The simulator against the real server: slot hits and stalls on three traces."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from transformers import LlamaForCausalLM

from branchline.serving.serve_config import EngineConfig
from branchline.serving.simulate.clock import MeasuredClock
from branchline.serving.simulate.replica import Replica
from branchline.serving.simulate.slots import SimulatedAdapter
from branchline.serving.simulate.trace import Trace, read_trace
from tests.models import save_adapter

ADAPTERS, SLOTS, CLIENTS = 10, 3, 3
SIZES = f"requests=240,clients={CLIENTS},prompt=4,output=6"
TRACES = {
    "popular": f"zipf:1.2,{SIZES},seed=1",
    "flat": f"uniform,{SIZES},seed=2",
    "with base requests": f"zipf:0.8,{SIZES},base=0.4,seed=3",
}


@pytest.fixture(scope="module")
def adapters(model_folder, tmp_path_factory):
    """As the simulator calls them."""
    root = tmp_path_factory.mktemp("many")
    model = LlamaForCausalLM.from_pretrained(model_folder)
    return {
        f"adapter{index}": save_adapter(
            model, root / f"adapter{index}", ["q_proj", "v_proj"], rank=4, seed=index
        )
        for index in range(ADAPTERS)
    }


def counted(url: str) -> dict[str, float]:
    """Slot lookups and loads so far."""
    names = {
        'branchline_adapter_slot_lookups_total{outcome="hit"}': "hits",
        'branchline_adapter_slot_lookups_total{outcome="miss"}': "misses",
        "branchline_adapter_slot_load_seconds_count": "loads",
        "branchline_adapter_slot_load_seconds_sum": "seconds",
    }
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {names[name]: float(value) for name, _, value in pairs if name in names}


async def ask(url: str, base: str, trace: Trace) -> None:
    """As many clients as the trace has, each with one request at a time."""
    left = iter(trace)

    async def client(http: httpx.AsyncClient) -> None:
        for request in left:
            answer = await http.post(
                "/v1/completions",
                json={
                    "model": request.adapter or base,
                    "prompt": [5 + n % 50 for n in range(request.prompt)],
                    "max_tokens": request.output,
                    "ignore_eos": True,
                    "temperature": 0,
                },
            )
            assert answer.status_code == 200, answer.text

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        assert trace.clients is not None
        await asyncio.gather(*(client(http) for _ in range(trace.clients)))


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    return {"max_loras": SLOTS, "enable_prefix_caching": False}


@pytest.mark.parametrize("name", TRACES)
def test_hits_and_stalls_are_predicted_within_a_tenth(name, start_server, adapters, settings):
    flags = [f"--adapter={n}={folder}" for n, folder in adapters.items()]
    server = start_server(
        *flags, "--max-loras", str(SLOTS), "--no-enable-prefix-caching", adapters=False
    )
    trace = read_trace(TRACES[name], ADAPTERS)
    before = counted(server.url)
    asyncio.run(ask(server.url, server.model, trace))
    after = counted(server.url)
    real = {key: after[key] - before[key] for key in after}
    # What one load takes here is measured; how many there are, and when, is what is predicted.
    clock = MeasuredClock(0.003, real["seconds"] / real["loads"])
    simulated = {n: SimulatedAdapter(n, 0, 4, 1) for n in trace.names}
    # At start the first ones take the free slots.
    replica = Replica(EngineConfig.checked(**settings), simulated, clock, 1 << 30)
    replica.fill(list(simulated.values())[:SLOTS])
    result = replica.run(trace)
    hit_rate = real["hits"] / (real["hits"] + real["misses"])
    predicted = result.hits / (result.hits + result.misses)
    assert predicted == pytest.approx(hit_rate, rel=0.1)
    assert result.stall_seconds == pytest.approx(real["seconds"], rel=0.1)
