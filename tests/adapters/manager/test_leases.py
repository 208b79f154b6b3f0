"""A request that takes many batches goes on with the content that it began with."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from branchline.adapters.version import AdapterState, Tier
from branchline.core.errors import AdapterNotFoundError, BatchError


def test_a_lease_outlives_a_swap_and_an_unload(world, adapter):
    w = world(2)
    w.manager.load("a", adapter("first"))
    first = w.answer("a")
    with w.manager.lease("a") as lease:
        assert lease.digest == w.manager.info("a").digest
        w.manager.swap("a", adapter("second"))
        second = w.answer("a")
        assert not torch.equal(first, second)
        assert torch.equal(w.answer(lease), first)
        both = w.answer(lease, "a")
        torch.testing.assert_close(both[0], first[0])
        torch.testing.assert_close(both[1], second[0])
        w.manager.unload("a")
        assert torch.equal(w.answer(lease), first)
        assert [info.state for info in w.manager.draining()] == [AdapterState.DRAINING]
    assert w.manager.draining() == ()
    assert w.tensors() == []


def test_between_batches_it_takes_no_slot(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    a = w.answer("a")
    lease = w.manager.lease("a")
    w.manager.load("b", adapter("b"))
    b = w.answer("b")
    assert w.manager.info("a").tier == Tier.HOST
    assert torch.equal(w.answer(lease), a)
    assert w.manager.info("b").tier == Tier.HOST
    assert torch.equal(w.answer("b"), b)
    lease.release()


def test_it_stays_in_host_memory(world, adapter):
    """Its source may change, so that it could not be read again."""
    w = world(1, adapters=1)
    names = "abcd"
    for name in names:
        w.manager.load(name, adapter(name))
    answers = {name: w.answer(name) for name in names}
    lease = w.manager.lease("a")
    for name in names:
        w.manager.unload(name)
        w.manager.load(name, adapter(f"other {name}"))
        w.answer(name)
    assert torch.equal(w.answer(lease), answers["a"])
    lease.release()
    assert w.manager.memory().host_adapters <= 1


def test_leases_of_one_content_are_alike(world, adapter):
    w = world(2)
    w.manager.load("a", adapter("a"))
    leases = [w.manager.lease("a") for _ in range(3)]
    memos = []
    for lease in leases:
        with w.manager.rows([lease, None]) as batch:
            memos.append(batch.memo)
    assert all(memo is memos[0] for memo in memos)
    for lease in leases:
        lease.release()
        lease.release()
    assert w.manager._store._by_digest[leases[0].digest].leases == 0


def test_what_was_released_serves_no_batch(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    lease = w.manager.lease("a")
    answer = w.answer("a")
    block = w.manager.rows([lease])
    with block:
        lease.release()
        w.manager.unload("a")
        assert torch.equal(w.forward(1), answer), "the batch holds it"
    assert w.tensors() == []
    with (
        pytest.raises(BatchError, match=r"the lease of adapter 'a'.*has ended"),
        w.manager.rows([lease]),
    ):
        pass
    with pytest.raises(AdapterNotFoundError):
        w.manager.lease("a")


def test_a_lease_that_was_forgotten_ends(world, adapter):
    w = world(1)
    w.manager.load("a", adapter("a"))
    w.manager.load("b", adapter("b"))
    lease = w.manager.lease("a")
    w.manager.unload("a")
    assert "Lease('a'" in repr(lease)
    del lease
    gc.collect()
    w.answer("b")
    assert w.manager.draining() == ()
    assert len(w.manager._store._by_digest) == 1


def test_threads(world, adapter):
    """Requests of several batches, beside swaps of their name."""
    w = world(2)
    contents = {name: adapter(name) for name in ("one", "two", "three")}
    expected = {}
    for name, folder in contents.items():
        w.manager.load(name, folder)
        expected[w.manager.info(name).digest] = w.answer(name)
        w.manager.unload(name)
    w.manager.load("a", contents["one"])
    stop = threading.Event()

    def request() -> bool:
        right = True
        for _ in range(40):
            with w.manager.lease("a") as lease:
                for _ in range(3):
                    # Grad mode is a thread's own.
                    with torch.no_grad():
                        right &= torch.equal(w.answer(lease), expected[lease.digest])
        return right

    def swap() -> None:
        while not stop.is_set():
            for name in contents:
                w.manager.swap("a", contents[name])

    with ThreadPoolExecutor(4) as pool:
        swapping = pool.submit(swap)
        requests = [pool.submit(request) for _ in range(3)]
        try:
            assert all(future.result(120) for future in requests)
        finally:
            stop.set()
        swapping.result(60)
    assert w.manager.draining() == ()
    assert len(w.manager._store._by_digest) == 1
