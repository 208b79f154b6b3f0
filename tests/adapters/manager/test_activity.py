"""What the manager counts of operations and evictions, and its names by state."""

from __future__ import annotations

import shutil

import pytest

from branchline.adapters.activity import OK, Operation, OperationLog
from branchline.adapters.version import AdapterState, Tier
from branchline.core.errors import (
    AdapterBrokenError,
    AdapterExistsError,
    AdapterNotFoundError,
)


def counts(manager):
    return {key: found.count for key, found in manager.counters().operations.items()}


def test_operations_are_counted_by_outcome(world, adapter):
    w = world(2)
    w.manager.load("a", adapter("a"))
    with pytest.raises(AdapterExistsError):
        w.manager.load("a", adapter("a"))
    w.manager.swap("a", adapter("b"))
    w.manager.reload("a")
    w.manager.unload("a")
    with pytest.raises(AdapterNotFoundError):
        w.manager.unload("a")
    assert counts(w.manager) == {
        (Operation.LOAD, OK): 1,
        (Operation.LOAD, "AdapterExistsError"): 1,
        (Operation.SWAP, OK): 2,
        (Operation.UNLOAD, OK): 1,
        (Operation.UNLOAD, "AdapterNotFoundError"): 1,
    }
    assert all(found.seconds > 0 for found in w.manager.counters().operations.values())


def test_reads_are_counted_for_first_uses_and_for_returns(world, adapter):
    w = world(1, adapters=1)
    w.manager.register("a", adapter("a"))
    assert counts(w.manager) == {}
    w.answer("a")
    assert counts(w.manager) == {(Operation.READ, OK): 1}
    w.manager.load("b", adapter("b"))
    w.answer("b")
    before = counts(w.manager)[Operation.READ, OK]
    w.answer("a")
    assert counts(w.manager)[Operation.READ, OK] == before + 1


def test_evictions_are_counted_by_tier(world, adapter):
    w = world(2, adapters=2)
    for name in "abc":
        w.manager.load(name, adapter(name))
    before = w.manager.counters()
    assert before.slot_evictions == 0
    assert before.host_evictions == 1
    for name in "abc":
        w.answer(name)
    # c takes the slot of a.
    assert w.manager.counters().slot_evictions == 1
    assert w.manager.counters().slot_loads.count == 3
    assert w.manager.counters().slot_loads.seconds > 0
    w.answer("b", "c")
    assert w.manager.counters().slot_evictions == 1


def test_a_batch_that_is_refused_evicts_nothing(world, adapter):
    w = world(1)
    for name in "abc":
        w.manager.load(name, adapter(name))
    with pytest.raises(Exception, match="every slot"), w.manager.rows(["a", "b"]):
        pass
    assert w.manager.counters().slot_evictions == 0


def test_names_are_counted_by_state_and_tier(world, adapter):
    w = world(1, adapters=2)
    w.manager.load("a", adapter("a"))
    w.manager.load("b", adapter("b"))
    w.manager.register("c", adapter("c"))
    assert w.manager.states() == {
        (AdapterState.READY, Tier.DEVICE): 1,
        (AdapterState.READY, Tier.HOST): 1,
        (AdapterState.REGISTERED, Tier.DISK): 1,
    }
    gone = adapter("d")
    w.manager.register("d", gone)
    shutil.rmtree(gone)
    for _ in range(2):
        with pytest.raises((AdapterNotFoundError, AdapterBrokenError)):
            w.answer("d")
    assert w.manager.states()[AdapterState.BROKEN, Tier.DISK] == 1
    by_listing = sorted((info.state, info.tier) for info in w.manager.list())
    by_count = sorted(key for key, n in w.manager.states().items() for _ in range(n))
    assert by_count == by_listing


def test_an_error_of_nobody_s_is_no_success():
    log = OperationLog()
    with pytest.raises(ZeroDivisionError), log.timed(Operation.LOAD):
        raise ZeroDivisionError
    assert {key: found.count for key, found in log.counts().items()} == {
        (Operation.LOAD, "error"): 1
    }
