"""What happens between the steps of two threads, one after the other here."""

from __future__ import annotations

import threading

import pytest
import torch

from branchline.core.errors import AdapterNotFoundError, BatchError, ConfigError


def _interrupted(monkeypatch, owner, name: str, between) -> None:
    """Run `between` once, when `owner.name` is called for the first time, before it goes on."""
    original, done = getattr(owner, name), threading.Event()

    def call(*args, **kwargs):
        if not done.is_set():
            done.set()
            between()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def test_what_is_swapped_while_a_batch_is_made_is_not_kept(world, adapter, monkeypatch):
    w = world(2)
    w.manager.load("x", adapter("one"))
    new = adapter("two", layers=("model.second",))
    _interrupted(monkeypatch, w.manager._store, "place", lambda: w.manager.swap("x", new))
    with w.manager.rows(["x"]):
        expected_of_old = w.forward()
        found: list[torch.Tensor] = []

        def other() -> None:
            # Whether gradients are recorded is a thread's own setting.
            with torch.no_grad():
                found.append(w.answer("x"))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    with torch.no_grad():
        assert torch.equal(found[0], w.answer("x"))
    assert not torch.equal(found[0], expected_of_old)


def test_what_is_unloaded_while_a_batch_is_made_is_unknown_to_the_next(world, adapter, monkeypatch):
    w = world(2)
    w.manager.load("x", adapter("one"))
    _interrupted(monkeypatch, w.manager._store, "place", lambda: w.manager.unload("x"))
    with w.manager.rows(["x"]):
        failed: list[Exception] = []

        def other() -> None:
            try:
                w.answer("x")
            except AdapterNotFoundError as error:
                failed.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(failed) == 1


def test_a_swap_goes_before_a_first_read_that_ends_later(world, adapter, monkeypatch):
    w = world(2)
    old, new = adapter("one"), adapter("two", layers=("model.second",))
    w.manager.register("x", old)
    original, reading = w.manager._store.disk.read, threading.Event()
    swap = threading.Thread(target=lambda: w.manager.swap("x", new))

    def read(source):
        if threading.current_thread() is swap:
            # The name was looked up; now its first use begins to read what was there before.
            assert reading.wait(20)
        else:
            reading.set()
            swap.join(20)
        return original(source)

    monkeypatch.setattr(w.manager._store.disk, "read", read)
    swap.start()
    w.answer("x")
    swap.join(20)
    monkeypatch.undo()
    w.manager.load("same", new)
    assert w.manager.info("x").digest == w.manager.info("same").digest


def test_rows_may_be_any_iterable_of_names(world, adapter):
    w = world(1)
    w.manager.load("x", adapter("one"))
    with w.manager.rows(iter(["x", None])) as batch:
        assert batch.rows == 2
    with pytest.raises(BatchError, match="rows"), w.manager.rows({"x": 1.0}):
        pass
    assert w.manager.info("x").batches == 0
    w.manager.close()


def test_a_block_ends_once(world, adapter):
    w = world(1)
    w.manager.load("x", adapter("one"))
    block = w.manager.rows(["x"])
    with block:
        pass
    block.__exit__(None, None, None)
    assert w.manager.info("x").batches == 0
    w.manager.close()


def test_settings_are_checked_before_they_are_set(world, adapter):
    w = world(1)
    w.manager.load("x", adapter("one"))
    with pytest.raises(ConfigError, match="no integer"):
        w.manager.set_priority("x", "high")
    assert w.manager.info("x").priority == 0
    assert w.manager.pin("x").batches == 0
    for names in ("x", [5]):
        with pytest.raises(ConfigError, match="prefetch"):
            w.manager.prefetch(names)
