"""A simulated replica against the engine's rules, and its slots against the manager's."""

from __future__ import annotations

import random

import pytest

from branchline import wrap
from branchline.adapters.tiers.eviction import Eviction
from branchline.adapters.tiers.limits import TierLimits
from branchline.serving.serve_config import EngineConfig
from branchline.serving.simulate.clock import MeasuredClock
from branchline.serving.simulate.replica import Replica, ReplicaResult
from branchline.serving.simulate.slots import SimulatedAdapter, SimulatedSlots
from branchline.serving.simulate.trace import Trace, TracedRequest, read_trace
from tests import models

STEP, LOAD = 0.01, 0.5


def simulate(trace: Trace, blocks: int = 1 << 30, **settings) -> ReplicaResult:
    adapters = {name: SimulatedAdapter(name, 0, 8, 1000) for name in trace.names}
    config = EngineConfig.checked(**settings)
    return Replica(config, adapters, MeasuredClock(STEP, LOAD), blocks).run(trace)


def requests(*adapters: str | None, output: int = 4, apart: float = 0.0) -> Trace:
    made = [TracedRequest(index * apart, name, 3, output) for index, name in enumerate(adapters)]
    return Trace.of(made, None if apart else len(made))


def test_all_tokens_are_made_and_counted_once():
    trace = read_trace("zipf:1.0,requests=300,clients=7,prompt=20,output=9,base=0.2", 12)
    result = simulate(trace, max_loras=3)
    assert result.tokens == int(trace.outputs.sum())
    assert len(result.first_token_seconds) == len(trace)
    assert result.hits + result.misses == int((trace.adapters >= 0).sum())
    # Requests that begin together share a load.
    assert result.loads > 0
    assert result.misses > 0
    assert result.stall_seconds == pytest.approx(result.loads * LOAD)
    assert result.busy_seconds == pytest.approx(result.steps * STEP + result.stall_seconds)
    assert result.base_seconds == pytest.approx(result.steps * STEP)


def test_what_fits_is_loaded_once():
    result = simulate(requests("a", "b", "a", "b"), max_loras=2)
    assert (result.hits, result.misses, result.loads) == (0, 4, 2)
    # One after the other, so that the second of each finds a slot.
    result = simulate(requests("a", "b", "a", "b", apart=10.0), max_loras=2)
    assert (result.hits, result.misses, result.loads) == (2, 2, 2)


def test_the_least_recently_used_makes_room():
    result = simulate(requests("a", "b", "a", "c", "a", "b", apart=10.0), max_loras=2)
    # c takes the slot of b, and b that of c.
    assert (result.hits, result.misses) == (2, 4)


def test_base_requests_load_nothing_and_run_together():
    result = simulate(requests(*[None] * 8, output=5), max_loras=1)
    assert result.loads == result.hits == result.misses == 0
    assert result.steps == 5
    assert result.seconds == pytest.approx(5 * STEP)


def test_adapters_take_turns_where_slots_are_too_few():
    result = simulate(requests("a", "b", output=64), max_loras=1, adapter_turn_steps=16)
    # Of 16 steps each, four times.
    assert result.loads == 8
    assert result.tokens == 128


def test_requests_that_do_not_fit_the_batch_wait():
    result = simulate(requests(*[None] * 4, output=10), max_num_seqs=1)
    assert result.steps == 40
    assert result.first_token_seconds == pytest.approx([STEP, 11 * STEP, 21 * STEP, 31 * STEP])


def test_one_seat_is_shared_by_adapters_that_take_turns():
    result = simulate(requests("a", "b", "c", output=400), max_loras=1, max_num_seqs=1)
    assert result.tokens == 1200


def test_long_prompts_take_several_steps():
    trace = Trace.of([TracedRequest(0.0, None, 100, 1)], 1)
    assert simulate(trace, max_num_batched_tokens=32).steps == 4


def test_a_small_cache_lets_requests_wait():
    free = simulate(requests(*[None] * 4, output=30))
    tight = simulate(requests(*[None] * 4, output=30), blocks=3, block_size=16)
    assert tight.tokens == free.tokens
    assert tight.steps > free.steps


def test_steps_that_are_alike_are_not_counted_otherwise_than_one_by_one():
    # One that waits at the end keeps the replica from taking several steps at once.
    together = requests("a", None, "b", output=40)
    alone = Trace.of([*together, TracedRequest(0.0, None, 3, 1)], 3)
    fast, slow = simulate(together, max_loras=2), simulate(alone, max_loras=2)
    assert fast.steps == 40
    assert slow.steps == 41
    assert (fast.loads, fast.tokens + 1) == (slow.loads, slow.tokens)


@pytest.mark.parametrize("eviction", Eviction)
def test_slots_are_given_as_the_manager_gives_them(eviction, tmp_path):
    """Random batches on the real device tier and on the simulated one."""
    names, ranks, drawn = "abcdefgh", {}, random.Random(7)
    served = wrap(models.build("llama"), lora_slots="2:2,8:2", eviction=eviction)
    for index, name in enumerate(names):
        ranks[name] = 8 if index % 3 == 0 else 2
        models.save_adapter(
            models.build("llama"), tmp_path / name, ["q_proj"], rank=ranks[name], seed=index
        )
        served.adapters.register(name, tmp_path / name)
    simulated = SimulatedSlots(TierLimits({2: 2, 8: 2}, eviction=eviction))
    adapters = {name: SimulatedAdapter(name, 0, ranks[name], 1) for name in names}
    # Each once, in the order that batches are sorted by below.
    for name in names:
        with served.adapters.rows([name]):
            simulated.place([adapters[name]])
    loads = 0
    before = served.adapters.counters().slot_loads.count
    for _ in range(300):
        wide = [name for name in names if ranks[name] == 8]
        narrow = [name for name in names if ranks[name] == 2]
        batch = sorted(drawn.sample(wide, 1) + drawn.sample(narrow, drawn.randint(0, 2)))
        with served.adapters.rows(batch):
            loads += len(simulated.place([adapters[name] for name in batch]))
    # Of adapters that were used last in one batch, either may go: the two need not agree on which.
    real = served.adapters.counters().slot_loads.count - before
    assert real > 100
    assert loads == pytest.approx(real, rel=0.05)
