"""Slots, host memory, disk: who makes room for whom, and what never does."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch

from branchline.adapters.version import Tier
from branchline.core.errors import AdapterBrokenError, AdapterCapacityError, AdapterNotFoundError


def load_all(w, adapter, names, **settings):
    for name in names:
        w.manager.load(name, adapter(name, **settings))


# --- eviction -----------------------------------------------------------------------------------


def test_the_one_used_longest_ago_goes_first(world, adapter):
    w = world(3)
    load_all(w, adapter, "abcd")
    for name in "abcab":
        w.answer(name)
    w.answer("d")
    assert w.resident() == {"a", "b", "d"}
    w.answer("c")
    assert w.resident() == {"b", "d", "c"}


def test_the_one_used_least_often_goes_first(world, adapter):
    w = world(3, eviction="lfu")
    load_all(w, adapter, "abcd")
    for name in "aaabccc":
        w.answer(name)
    w.answer("d")
    assert w.resident() == {"a", "c", "d"}
    w.answer("b")
    assert w.resident() == {"a", "c", "b"}


def test_the_lowest_priority_goes_first(world, adapter):
    w = world(3, eviction="priority")
    load_all(w, adapter, "abcd")
    for name, priority in (("a", 5), ("b", 1), ("c", 3)):
        assert w.manager.set_priority(name, priority).priority == priority
    for name in "bacb":
        w.answer(name)
    w.answer("d")
    assert w.resident() == {"a", "c", "d"}
    w.manager.set_priority("d", 4)
    w.manager.set_priority("a", -1)
    w.answer("b")
    assert w.resident() == {"b", "c", "d"}


def test_host_memory_keeps_to_its_number(world, adapter):
    w = world(1, adapters=3)
    load_all(w, adapter, "abcdef")
    assert w.manager.memory().host_adapters == 3
    assert [info.tier for info in w.manager.list()].count(Tier.DISK) == 2
    answers = {name: w.answer(name) for name in "abcdef"}
    assert w.manager.memory().host_adapters == 3
    assert all(torch.equal(w.answer(name), answers[name]) for name in "fedcba")


def test_host_memory_keeps_to_its_bytes(world, adapter):
    one = world().manager.load("a", adapter("a")).nbytes
    w = world(1, nbytes=2 * one)
    load_all(w, adapter, "abcd")
    assert w.manager.memory().host_bytes == 2 * one
    w.manager.load("large", adapter("large", rank=4))
    assert w.manager.memory().host_bytes <= 2 * one
    # Too large for host memory next to anything: it passes through to its slot.
    w = world(1, nbytes=one)
    load_all(w, adapter, "a")
    w.manager.load("large", adapter("large", rank=4))
    w.answer("large")
    assert w.manager.info("large").tier is Tier.DEVICE
    assert w.manager.memory().host_bytes <= one


def test_no_host_memory_at_all(world, adapter):
    w = world(1, adapters=0)
    load_all(w, adapter, "ab")
    answers = {name: w.answer(name) for name in "abab"}
    assert w.manager.memory().host_bytes == 0
    assert not torch.equal(answers["a"], answers["b"])
    assert torch.equal(w.answer("a"), answers["a"])


# --- what is never evicted ----------------------------------------------------------------------


def test_pinned_adapters_stay(world, adapter):
    w = world(2, adapters=2)
    load_all(w, adapter, "abc")
    w.answer("a")
    assert w.manager.pin("a").pinned
    for name in "bcbcbc":
        w.answer(name)
        assert w.manager.info("a").tier is Tier.DEVICE
    assert w.manager.memory().host_adapters == 2
    with pytest.raises(AdapterCapacityError, match="pinned"):
        w.answer("b", "c")
    w.manager.unpin("a")
    w.answer("b", "c")
    assert w.manager.info("a").slot is None


def test_a_pin_is_of_the_name_and_survives_a_swap(world, adapter):
    w = world(1)
    load_all(w, adapter, "ab")
    w.answer("a")
    w.manager.pin("a")
    w.manager.swap("a", adapter("c"))
    w.answer("a")
    with pytest.raises(AdapterCapacityError):
        w.answer("b")
    w.manager.unload("a")
    w.answer("b")


def test_no_more_is_pinned_than_host_memory_holds(world, adapter):
    w = world(1, adapters=2)
    load_all(w, adapter, "abcd")
    w.answer("d")
    for name in "abb":
        w.manager.pin(name)
    with pytest.raises(AdapterCapacityError, match="max_cpu_loras"):
        w.manager.pin("c")
    assert not w.manager.info("c").pinned
    # In its slot it takes no host memory.
    w.manager.pin("d")
    assert [info.name for info in w.manager.list() if info.tier is Tier.HOST] == ["a", "b"]
    assert w.manager.memory().host_adapters == 2


def test_adapters_in_flight_stay(world, adapter):
    w = world(1, adapters=1)
    load_all(w, adapter, "ab")
    before = w.answer("a")
    with w.manager.rows(["a"]):
        with pytest.raises(AdapterCapacityError, match="in flight"), w.manager.rows_of_call(["b"]):
            pass
        assert torch.equal(w.forward(), before)
    w.answer("b")
    assert torch.equal(w.answer("a"), before)


# --- slots --------------------------------------------------------------------------------------


def test_a_batch_with_more_adapters_than_slots(world, adapter):
    w = world(2)
    load_all(w, adapter, "abc")
    with pytest.raises(AdapterCapacityError, match="max_loras=2"):
        w.answer("a", "b", "c")
    assert all(info.batches == 0 for info in w.manager.list())
    w.answer("a", "b", "a", None, "b", None)
    w.answer(None, None, None)


def test_a_refused_batch_evicts_nobody(world, adapter):
    w = world(3)
    load_all(w, adapter, "abcde")
    w.answer("a", "b", "c")
    with w.manager.rows(["a", "b"]):
        with pytest.raises(AdapterCapacityError), w.manager.rows_of_call(["d", "e"]):
            pass
        assert w.resident() == {"a", "b", "c"}
        plans = w.plans
        with w.manager.rows_of_call(["a", "b", "c"]):
            pass
        assert w.plans == plans


def test_swaps_use_the_spare_slot_and_give_it_back(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    with w.manager.rows(["a"]):
        w.manager.swap("a", adapter("b"))
        assert w.slot_of("a") is not None
        # Requests would find no slot until a batch ends: so the swap is refused.
        with w.manager.rows_of_call(["a"]), pytest.raises(AdapterCapacityError):
            w.manager.swap("a", adapter("c"))
    for index in range(5):
        w.manager.swap("a", adapter("x", index))
        w.answer("a")
    w.manager.load("d", adapter("d"))
    with pytest.raises(AdapterCapacityError):
        w.answer("a", "d")


def test_the_spare_slot_comes_back_where_an_alias_keeps_the_old_version(world, adapter):
    w = world(1)
    for name in "ab":
        w.manager.load(name, adapter(name, 1))
    w.answer("a")
    w.manager.swap("a", adapter("c"))
    assert w.manager.memory().slots_taken == 1
    with pytest.raises(AdapterCapacityError):
        w.answer("a", "b")


def test_slots_of_several_ranks(world, adapter):
    w = world({2: 2, 4: 1})
    assert w.manager.memory().slots == 5
    for name, rank in (("a", 1), ("b", 2), ("c", 2), ("d", 4)):
        w.manager.load(name, adapter(name, rank=rank))
    low, high = {0, 1, 2}, {3, 4}
    # The third small one took the large slot, for nothing else wanted it.
    assert {w.slot_of("a"), w.slot_of("b")} < low
    assert w.slot_of("c") in high
    alone = w.answer("d")
    assert w.slot_of("d") in high
    assert w.slot_of("c") is None
    assert torch.equal(w.answer("d"), alone)
    with pytest.raises(AdapterCapacityError, match="2 of rank 2, 1 of rank 4"):
        w.answer("a", "b", "c", "d")
    with pytest.raises(AdapterCapacityError, match=r"8\b.*4"):
        w.manager.load("e", adapter("e", rank=8))


def test_a_small_adapter_leaves_a_large_slot_to_its_own_batch(world, adapter):
    w = world({2: 1, 4: 1})
    for name, rank in (("a", 2), ("b", 2), ("large", 4)):
        w.manager.load(name, adapter(name, rank=rank))
    assert w.slot_of("b") == w.manager.memory().slots - 2
    expected = [w.answer("b", "b")[0], w.answer("large", "large")[0]]
    w.answer("a", "b")
    assert w.resident() == {"a", "b"}
    both = w.answer("b", "large")
    assert w.resident() == {"b", "large"}
    assert torch.equal(both, torch.stack(expected))


def test_no_slots(world, adapter):
    w = world({})
    for begin in (w.manager.load, w.manager.register):
        with pytest.raises(AdapterCapacityError, match="max_loras=0"):
            begin("a", adapter("a"))
    assert w.manager.list() == ()
    w.answer(None, None)


# --- plans --------------------------------------------------------------------------------------


def test_moving_between_tiers_changes_no_plan(world, adapter):
    w = world(1, adapters=1)
    load_all(w, adapter, "ab")
    for name in "ab":
        w.answer(name)
    epoch, live = w.registry.epoch, w.manager.live("ab")
    for name in "abab":
        w.answer(name)
    assert w.registry.epoch == epoch
    assert w.manager.live("ab") == live
    plans = w.plans
    for _ in range(3):
        w.answer("b", None)
    assert w.plans == plans + 1


def test_a_batch_that_is_kept_ready_is_not_used_after_its_slots_moved(world, adapter):
    w = world(2)
    load_all(w, adapter, "abc")
    expected = {names: w.answer(*names) for names in (("a", "b"), ("b", "c"), ("c", "a"))}
    for _ in range(2):
        for names, answer in expected.items():
            assert torch.equal(w.answer(*names), answer)


def test_other_layers_of_a_reused_slot_are_left_alone(world, adapter):
    w = world(1)
    w.manager.load("both", adapter("both"))
    w.manager.load("one", adapter("one", layers=("model.second",)))
    base, both = w.answer(), w.answer("both")
    one = w.answer("one")
    assert torch.equal(one[:, :8], base[:, :8])
    assert not torch.equal(one[:, 8:], base[:, 8:])
    first = w.registry.layers["model.first"].branch
    assert not first.low_rank.ranks.any()
    assert torch.equal(w.answer("both"), both)


# --- prefetch -----------------------------------------------------------------------------------


def test_prefetch_reads_beside_the_batches(world, adapter):
    w = world(2, adapters=1)
    w.manager.load("a", adapter("a"))
    w.manager.register("b", adapter("b"))
    read, gate = w.manager._store.disk._read, threading.Event()

    def gated(folder):
        assert gate.wait(10)
        return read(folder)

    w.manager._store.disk._read = gated
    (future,) = w.manager.prefetch(["b", "b"])
    # The thread stands in the middle of reading, and batches enter.
    for _ in range(3):
        w.answer("a")
    assert not future.done()
    gate.set()
    assert future.result(10).tier is Tier.DEVICE
    w.manager._store.disk._read = None
    w.answer("b")
    w.manager.close()


def test_a_prefetch_that_fails_tells_whoever_asks(world, adapter, tmp_path):
    w = world(1)
    w.manager.register("a", tmp_path / "nothing")
    w.manager.register("b", adapter("b"))
    failed, done = w.manager.prefetch(["a", "b"])
    with pytest.raises(AdapterNotFoundError):
        failed.result(10)
    assert done.result(10).tier is Tier.DEVICE
    with pytest.raises(AdapterBrokenError):
        w.answer("a")
    w.manager.close()


def test_prefetch_evicts_nobody_from_a_slot(world, adapter):
    w = world(1)
    load_all(w, adapter, "ab")
    shutil.rmtree(adapter("unused"))
    assert w.manager.prefetch(["b"])[0].result(10).tier is Tier.HOST
    assert w.resident() == {"a"}
    w.manager.close()
