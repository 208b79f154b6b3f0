"""Names, contents and states: load, register, swap, unload, alias, break and mend."""

from __future__ import annotations

import shutil
import threading
import time

import pytest
import torch

from branchline.adapters.sources import LocalSource
from branchline.adapters.version import AdapterState, Tier
from branchline.core.errors import (
    AdapterBrokenError,
    AdapterBusyError,
    AdapterError,
    AdapterExistsError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    ConfigError,
)


def test_loading_more_than_there_are_slots(world, adapter):
    w = world(2)
    for name in "abcde":
        w.manager.load(name, adapter(name))
    assert w.resident() == {"a", "b"}
    base = w.answer()
    answers = {name: w.answer(name) for name in "abcde"}
    assert not any(torch.equal(answer, base) for answer in answers.values())
    for name in "edcba":
        assert torch.equal(w.answer(name), answers[name])
    assert torch.equal(w.answer(), base)
    assert all(info.state is AdapterState.READY and info.hits == 2 for info in w.manager.list())


def test_the_listing(world, adapter):
    w = world(1, adapters=2)
    w.manager.register("later", adapter("later"))
    info = w.manager.info("later")
    assert (info.state, info.digest, info.tier, info.modules) == (
        AdapterState.REGISTERED,
        "",
        Tier.DISK,
        0,
    )
    first = w.manager.load("a", adapter("a", rank=3))
    assert (first.state, first.tier, first.rank, first.modules) == (
        AdapterState.READY,
        Tier.DEVICE,
        3,
        2,
    )
    assert first.last_use is None
    before = time.time()
    w.answer("a", None, "a")
    info = w.manager.info("a")
    assert info.hits == 1
    assert before <= info.last_use <= time.time()
    w.answer("later")
    assert [i.name for i in w.manager.list()] == ["later", "a"]
    assert {i.name: i.tier for i in w.manager.list()} == {"later": Tier.DEVICE, "a": Tier.HOST}
    w.manager.load("b", adapter("b"))
    assert w.manager.info("a").tier is Tier.DISK
    memory = w.manager.memory()
    assert memory.host_adapters == 2
    assert memory.host_bytes == sum(t.nbytes for t in w.tensors())
    assert (memory.slots, memory.slots_taken) == (2, 1)
    branches = [layer.branch for layer in w.registry]
    assert memory.device_bytes == sum(b.low_rank.a.nbytes + b.low_rank.b.nbytes for b in branches)


def test_names_of_one_content_share_it(world, adapter):
    w = world(2)
    first = w.manager.load("a", adapter("a", 1))
    epoch = w.registry.epoch
    second = w.manager.load("b", adapter("b", 1))
    assert w.registry.epoch > epoch
    assert (first.digest, first.slot) == (second.digest, second.slot)
    assert second.aliases == ("a",)
    assert w.manager.memory().host_adapters == w.manager.memory().slots_taken == 1
    (key,) = w.manager.live(["a", "b"])
    answer = w.answer("a", "b")
    assert torch.equal(answer[0], answer[1])
    w.manager.unload("a")
    assert torch.equal(w.answer("b", "b"), answer)
    # Whoever asks is told a name that still exists.
    layer = next(iter(w.registry))
    assert {reader.name for reader in w.registry.raw_readers(layer)} == {"b"}
    assert w.manager.live(["b"]) == {key: "b"}
    w.manager.swap("b", adapter("c"))
    assert not torch.equal(w.answer("b", "b"), answer)


def test_a_swap_of_one_name_leaves_its_alias(world, adapter):
    w = world(2)
    for name in "ab":
        w.manager.load(name, adapter(name, 1))
    before = w.answer("a")
    w.manager.swap("a", adapter("new"))
    assert torch.equal(w.answer("b"), before)
    assert not torch.equal(w.answer("a"), before)
    assert len(w.manager.live("ab")) == 2


def test_swapping_to_the_same_content_is_no_new_version(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a", 1))
    key, answer = w.manager.live("a"), w.answer("a")
    w.manager.swap("a", adapter("b", 1))
    assert w.manager.live("a") == key
    assert w.manager.info("a").source.endswith("b")
    assert torch.equal(w.answer("a"), answer)


def test_batches_finish_on_the_version_they_began_with(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    old = w.answer("a")
    with w.manager.rows(["a"]):
        w.manager.swap("a", adapter("b"))
        assert torch.equal(w.forward(), old)
        (drained,) = w.manager.draining()
        assert (drained.name, drained.state, drained.batches) == ("a", AdapterState.DRAINING, 1)
        with w.manager.rows_of_call(["a"]):
            assert not torch.equal(w.forward(), old)
        w.manager.unload("a")
        assert torch.equal(w.forward(), old)
        assert w.manager.list() == ()
    assert w.manager.draining() == ()
    assert w.manager.memory().slots_taken == w.manager.memory().host_bytes == 0
    with pytest.raises(AdapterNotFoundError, match="'a'"):
        w.answer("a")


def test_a_draining_version_gets_a_name_again(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    old = w.answer("a")
    with w.manager.rows(["a"]):
        w.manager.unload("a")
        w.manager.load("b", adapter("a"))
        assert w.manager.draining() == ()
        assert torch.equal(w.forward(), old)
    assert torch.equal(w.answer("b"), old)
    for name in "cd":
        w.manager.load(name, adapter(name))
        w.answer(name)
    assert torch.equal(w.answer("b"), old)


# --- draining -----------------------------------------------------------------------------------


def test_unload_waits_for_the_last_batch(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    entered, leave = threading.Event(), threading.Event()

    def serve() -> None:
        with w.manager.rows(["a"]):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=serve)
    thread.start()
    assert entered.wait(10)
    timer = threading.Timer(0.1, leave.set)
    timer.start()
    w.manager.unload("a", timeout=10)
    assert leave.is_set()
    assert w.manager.memory().slots_taken == 0
    thread.join()
    timer.join()


def test_draining_has_a_time_limit(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    with w.manager.rows(["a"]):
        began = time.monotonic()
        with pytest.raises(AdapterBusyError, match=r"batches in flight \(1\)"):
            w.manager.unload("a", timeout=0.05)
        assert time.monotonic() - began < 5
        # The manager serves on.
        w.manager.load("b", adapter("b"))
        with w.manager.rows_of_call(["b"]):
            pass
    assert w.manager.draining() == ()
    w.manager.load("a", adapter("a"))
    w.manager.unload("a", timeout=0)


# --- first use ----------------------------------------------------------------------------------


def test_a_registered_adapter_is_checked_at_first_use(world, adapter):
    w = world(1)
    folder = adapter("a")
    w.manager.register("a", folder)
    with pytest.raises(AdapterNotFoundError, match="not read"):
        w.manager.live(["a"])
    with pytest.raises(AdapterExistsError):
        w.manager.load("a", folder)
    assert not torch.equal(w.answer("a"), w.answer())
    assert w.manager.info("a").digest


def test_a_registered_adapter_that_cannot_be_read_is_broken(world, adapter):
    w = world(1)
    folder = adapter("a")
    tensors = folder / "adapter_model.safetensors"
    good = tensors.read_bytes()
    tensors.write_bytes(good[:-4])
    w.manager.register("a", folder)
    with pytest.raises(AdapterFormatError):
        w.answer("a")
    tensors.write_bytes(good)
    # It is not tried again by itself.
    with pytest.raises(AdapterBrokenError, match="safetensors"):
        w.answer("a", "a")
    info = w.manager.info("a")
    assert info.state is AdapterState.BROKEN
    assert "safetensors" in info.reason
    assert w.manager.reload("a").state is AdapterState.READY
    assert not torch.equal(w.answer("a"), w.answer())


def test_broken_adapters_are_forgotten_by_unload_and_mended_by_swap(world, adapter, tmp_path):
    w = world(1)
    for name in "ab":
        w.manager.register(name, tmp_path / "nothing")
        with pytest.raises(AdapterNotFoundError):
            w.answer(name)
        assert w.manager.info(name).state is AdapterState.BROKEN
    w.manager.unload("a")
    w.manager.swap("b", adapter("b"))
    assert [info.state for info in w.manager.list()] == [AdapterState.READY]
    w.answer("b")


def test_one_thread_reads_and_the_others_wait(world, adapter):
    w = world(1)
    w.manager.register("a", adapter("a"))
    read, calls = w.manager._store.disk._read, []

    def slow(folder):
        calls.append(folder)
        time.sleep(0.05)
        return read(folder)

    w.manager._store.disk._read = slow
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(w.answer("a"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1
    assert len(answers) == 4
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_unloading_a_name_that_is_being_read(world, adapter):
    w = world(1)
    read = w.manager._store.disk._read

    def unloading(folder):
        w.manager.unload("a")
        return read(folder)

    w.manager._store.disk._read = unloading
    for begin in (w.manager.load, w.manager.register):
        folder = adapter("a")

        def begin_and_use(begin=begin, folder=folder):
            begin("a", folder)
            w.answer("a")

        with pytest.raises(AdapterNotFoundError, match="'a'"):
            begin_and_use()
        assert w.manager.list() == ()
        assert w.manager.memory().slots_taken == w.manager.memory().host_bytes == 0


# --- sources ------------------------------------------------------------------------------------


def test_the_resolver_names_sources(world, adapter, tmp_path):
    asked = []

    def resolver(name):
        asked.append(name)
        folder = tmp_path / name
        return LocalSource(str(folder)) if folder.is_dir() else None

    w = world(2, resolver=resolver)
    adapter("known")
    answer = w.answer("known", None)
    assert not torch.equal(answer[0], answer[1])
    w.answer("known", None)
    with pytest.raises(AdapterNotFoundError, match="stranger"):
        w.answer("stranger")
    with pytest.raises(AdapterNotFoundError, match="stranger"):
        w.manager.prefetch(["stranger"])
    assert asked == ["known", "stranger", "stranger"]
    w.manager.resolver = None
    adapter("late")
    with pytest.raises(AdapterNotFoundError, match="late"):
        w.answer("late")


def test_an_adapter_whose_source_is_gone_breaks_alone(world, adapter):
    w = world(1, adapters=1)
    folders = {name: adapter(name) for name in "ab"}
    for name, folder in folders.items():
        w.manager.load(name, folder)
    answers = {name: w.answer(name) for name in "ab"}
    assert w.manager.info("a").tier is Tier.DISK
    shutil.rmtree(folders["a"])
    with pytest.raises(AdapterBrokenError, match=r"'a'.*no such"):
        w.answer("a", "b")
    assert w.manager.info("a").state is AdapterState.BROKEN
    assert torch.equal(w.answer("b"), answers["b"])
    assert all(info.batches == 0 for info in w.manager.list())
    adapter("a")
    with pytest.raises(AdapterBrokenError):
        w.answer("a")
    w.manager.reload("a")
    assert torch.equal(w.answer("a"), answers["a"])


def test_a_source_that_has_changed_is_not_served_unasked(world, adapter):
    w = world(1, adapters=1)
    for name in "ab":
        w.manager.load(name, adapter(name))
    before = w.answer("a")
    w.answer("b")
    assert w.manager.info("a").tier is Tier.DISK
    adapter("a", 99)
    with pytest.raises(AdapterBrokenError, match="has changed"):
        w.answer("a")
    with pytest.raises(AdapterBrokenError, match="has changed"):
        w.manager.pin("a")
    w.manager.reload("a")
    assert not torch.equal(w.answer("a"), before)


def test_an_alias_brings_its_content_back(world, adapter):
    w = world(1, adapters=1)
    folder = adapter("a", 1)
    w.manager.load("a", folder)
    w.manager.load("b", adapter("b", 1))
    answer = w.answer("a")
    w.manager.load("c", adapter("c"))
    w.answer("c")
    shutil.rmtree(folder)
    assert torch.equal(w.answer("a"), answer)


def test_what_came_from_memory_stays_there(world, adapter):
    w = world(1, adapters=1)
    weights = w.manager._read(adapter("a"))
    w.manager.install("a", weights)
    answer = w.answer("a")
    for name in "bc":
        w.manager.load(name, adapter(name))
        w.answer(name)
    assert torch.equal(w.answer("a"), answer)
    with pytest.raises(ConfigError, match="memory"):
        w.manager.reload("a")
    with pytest.raises(AdapterError, match="host memory"):
        w.manager.install("d", w.manager._read(adapter("d")))
    assert [info.name for info in w.manager.list()] == ["a", "b", "c"]


# --- refusals -----------------------------------------------------------------------------------


def test_a_refused_swap_or_load_leaves_no_trace(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    before, listing, epoch = w.answer("a"), w.manager.list(), w.registry.epoch
    wrong = adapter("wrong")
    config = wrong / "adapter_config.json"
    config.write_text(config.read_text().replace("first", "third"))
    for begin in (lambda: w.manager.load("b", wrong), lambda: w.manager.swap("a", wrong)):
        with pytest.raises((AdapterMismatchError, AdapterFormatError)):
            begin()
        assert w.manager.list() == listing
        assert w.registry.epoch == epoch
        assert torch.equal(w.answer("a"), before)
        listing = w.manager.list()


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.unload("x"),
        lambda m: m.swap("x", "somewhere"),
        lambda m: m.reload("x"),
        lambda m: m.pin("x"),
        lambda m: m.unpin("x"),
        lambda m: m.set_priority("x", 1),
        lambda m: m.prefetch(["x"]),
        lambda m: m.info("x"),
        lambda m: m.live(["x"]),
    ],
)
def test_unknown_names(world, call):
    with pytest.raises(AdapterNotFoundError, match=r"'x'.*loaded: none"):
        call(world().manager)


def test_many_names_are_not_all_listed_in_errors(world, adapter):
    w = world()
    for index in range(30):
        w.manager.register(f"n{index}", adapter("a"))
    with pytest.raises(AdapterNotFoundError, match="and 20 more"):
        w.answer("x")


def test_nothing_after_close(world, adapter):
    w = world()
    w.manager.load("a", adapter("a"))
    w.manager.prefetch(["a"])[0].result(10)
    with w.manager.rows(["a"]), pytest.raises(ConfigError, match="in flight"):
        w.manager.close()
    w.manager.close()
    for call in (
        lambda: w.answer("a"),
        lambda: w.manager.unload("a"),
        lambda: w.manager.load("b", adapter("b")),
        lambda: w.manager.swap("a", adapter("b")),
        lambda: w.manager.prefetch(["a"]),
    ):
        with pytest.raises(ConfigError, match="unwrapped"):
            call()
