"""What fails for a moment: a disk or a network that does not answer, a fork, a hold in passing."""

from __future__ import annotations

import errno
import os
import select
import threading
from contextlib import contextmanager

import pytest
import torch

from branchline.adapters import tensor_file
from branchline.adapters.sources import AdapterSource
from branchline.adapters.tiers.disk import is_passing
from branchline.core.errors import (
    AdapterBrokenError,
    AdapterCapacityError,
    AdapterError,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterSourceError,
)

PASSING = ("EMFILE", "ENFILE", "ENOMEM", "EIO", "EINTR", "ESTALE", "ETIMEDOUT", "ENOSPC")


@contextmanager
def failing(monkeypatch, number):
    """Every adapter file cannot be opened meanwhile."""
    real = tensor_file.os.open

    def refuse(path, *rest, **named):
        if str(path).endswith(("adapter_config.json", "adapter_model.safetensors")):
            raise OSError(number, os.strerror(number))
        return real(path, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(tensor_file.os, "open", refuse)
        yield


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("first", [True, False], ids=["first-read", "read-again"])
def test_a_failure_of_the_moment_breaks_nothing(world, adapter, monkeypatch, name, first):
    made = world(1, adapters=0)
    made.manager.register("a", adapter("a"))
    made.manager.register("b", adapter("b"))
    expected = None if first else made.answer("a")
    made.answer("b")
    with failing(monkeypatch, getattr(errno, name)):
        for _ in range(2):
            with pytest.raises(AdapterSourceError, match="cannot be read at the moment") as caught:
                made.answer("a")
        assert os.strerror(getattr(errno, name)) in str(caught.value)
        assert "try again" in caught.value.remedy
    state = "registered" if first else "ready"
    assert made.manager.info("a").state == state
    assert made.manager.info("a").reason == ""
    found = made.answer("a")
    assert expected is None or torch.equal(found, expected)


def test_what_is_gone_damaged_or_forbidden_stays_broken(world, adapter, monkeypatch):
    made = world(1, adapters=0)
    for name in ("a", "b", "c"):
        made.manager.load(name, adapter(name))
    made.answer("c")
    (adapter("a") / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(AdapterBrokenError, match="truncated"):
        made.answer("a")
    with failing(monkeypatch, errno.EACCES), pytest.raises(AdapterBrokenError):
        made.answer("b")
    for name in ("a", "b"):
        assert made.manager.info(name).state == "broken"


def test_a_source_that_has_it_goes_before_one_that_does_not_answer(world, adapter):
    made = world(1, adapters=0)
    folder = adapter("a")
    made.manager.load("a", folder)
    made.manager.load("same", adapter("same", seed=sum(map(ord, "a"))))
    expected = made.answer("a")
    made.manager.load("b", adapter("b"))
    made.answer("b")
    (folder / "adapter_model.safetensors").unlink()
    assert torch.equal(made.answer("a"), expected)


def chained(error: AdapterError, cause: BaseException | None) -> AdapterError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("source", "error", "passes"),
    [
        ("x", chained(AdapterFormatError("s", "r", "m"), OSError(errno.EIO, "x")), True),
        ("x", chained(AdapterFormatError("s", "r", "m"), TimeoutError()), True),
        ("x", chained(AdapterFormatError("s", "r", "m"), OSError(errno.EACCES, "x")), False),
        ("x", AdapterFormatError("s", "r", "m"), False),
        ("https://h/x", chained(AdapterSourceError("s", "r", "m"), ValueError()), True),
        ("https://h/x", AdapterSourceError("s", "above the limit", "m"), False),
        ("https://h/x", AdapterNotFoundError("s", "r", "m"), False),
        ("hf://o/n", AdapterFormatError("s", "r", "m"), False),
    ],
)
def test_which_failures_pass(source, error, passes):
    assert is_passing(error, AdapterSource.parse(source)) is passes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_prefetch_works_in_a_forked_child(world, adapter):
    made = world(2)
    made.manager.register("a", adapter("a"))
    made.manager.register("b", adapter("b"))
    for future in made.manager.prefetch(["a"]):
        future.result(10)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = b"failed"
        try:
            (future,) = made.manager.prefetch(["b"])
            told = future.result(10).state.encode()
            made.manager.close()
        finally:
            os.write(writer, told)
            os._exit(0)
    ready, _, _ = select.select([reader], [], [], 20)
    answer = os.read(reader, 100) if ready else b"hangs"
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert answer == b"ready"
    assert made.manager.prefetch(["b"])[0].result(10).name == "b"


def test_a_batch_waits_for_a_slot_that_a_prefetch_holds_in_passing(world, adapter, monkeypatch):
    made = world(1)
    made.manager.load("a", adapter("a"))
    made.manager.load("b", adapter("b"))
    made.answer("a")
    assert made.resident() == {"a"}
    held, go_on = threading.Event(), threading.Event()
    real = made.manager._store.bring_to_memory

    def slow(version, **options):
        real(version, **options)
        if threading.current_thread().name.startswith("branchline-prefetch"):
            held.set()
            assert go_on.wait(10)

    monkeypatch.setattr(made.manager._store, "bring_to_memory", slow)
    (future,) = made.manager.prefetch(["a"])
    assert held.wait(10)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    made.answer("b")
    assert go_on.is_set()
    assert future.result(10).name == "a"
    assert made.resident() == {"b"}
    timer.join()


def test_a_batch_that_keeps_a_slot_is_not_waited_for(world, adapter):
    made = world(1)
    made.manager.load("a", adapter("a"))
    made.manager.load("b", adapter("b"))
    refused = []

    def other():
        try:
            made.answer("b")
        except AdapterCapacityError as error:
            refused.append(error)

    with made.manager.rows(["a"]):
        made.manager.prefetch(["a"])[0].result(10)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert len(refused) == 1


@pytest.mark.parametrize("change", ["load", "swap", "reload"])
def test_a_change_that_meets_one_says_so(world, adapter, monkeypatch, change):
    made = world(2)
    made.manager.load("a", adapter("a"))
    answer = made.answer("a")
    with monkeypatch.context() as patch:

        def full(*arguments, **options):
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(os, "open", full)
        calls = {
            "load": lambda: made.manager.load("b", adapter("a")),
            "swap": lambda: made.manager.swap("a", adapter("a")),
            "reload": lambda: made.manager.reload("a"),
        }
        with pytest.raises(AdapterSourceError, match="cannot be read at the moment"):
            calls[change]()
    assert torch.equal(made.answer("a"), answer)
    assert [info.name for info in made.manager.list()] == ["a"]
