from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
import torch

from branchline.linear.batch import Batch, BatchScope, active_batch

OWNER = 10_001
OTHER = 10_002


class BarePlan:
    routes = ()
    branched = ()


def batch(rows: int = 1) -> Batch:
    return Batch(BarePlan(), rows, torch.full((0, rows), -1, dtype=torch.int32))


def test_nothing_is_active_outside():
    assert active_batch(OWNER) is None
    with BatchScope(OWNER, batch()):
        pass
    assert active_batch(OWNER) is None


def test_nested_scopes_restore_the_outer_one():
    outer, inner = batch(1), batch(2)
    with BatchScope(OWNER, outer):
        with BatchScope(OWNER, inner):
            assert active_batch(OWNER) is inner
        assert active_batch(OWNER) is outer
        with BatchScope(OTHER, inner):
            assert active_batch(OWNER) is outer
            assert active_batch(OTHER) is inner
        assert active_batch(OTHER) is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_restores(error):
    outer = batch()
    with BatchScope(OWNER, outer):
        with pytest.raises(error), BatchScope(OWNER, batch()):
            raise error
        assert active_batch(OWNER) is outer
    assert active_batch(OWNER) is None


def test_a_new_thread_sees_no_batch_of_another():
    seen = []
    with BatchScope(OWNER, batch()):
        thread = threading.Thread(target=lambda: seen.append(active_batch(OWNER)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_threads_that_run_at_once_keep_their_own():
    count, rounds = 4, 50
    barrier = threading.Barrier(count)
    wrong: list[tuple[int, int]] = []

    def serve(index: int) -> None:
        for turn in range(rounds):
            mine = batch(index + 1)
            with BatchScope(OWNER, mine):
                barrier.wait(timeout=30)
                if active_batch(OWNER) is not mine:
                    wrong.append((index, turn))
                barrier.wait(timeout=30)
            if active_batch(OWNER) is not None:
                wrong.append((index, turn))

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_tasks_keep_their_own_and_inherit_at_their_start():
    async def serve(rows: int, gate: asyncio.Barrier) -> bool:
        mine = batch(rows)
        with BatchScope(OWNER, mine):
            await gate.wait()
            await asyncio.sleep(0)
            kept = active_batch(OWNER) is mine
            await gate.wait()
        return kept

    async def inherit() -> Batch | None:
        return active_batch(OWNER)

    async def main() -> None:
        gate = asyncio.Barrier(3)
        assert all(await asyncio.gather(*(serve(rows, gate) for rows in (1, 2, 3))))
        assert active_batch(OWNER) is None
        outer = batch()
        with BatchScope(OWNER, outer):
            child = asyncio.create_task(inherit())
        assert await child is outer
        assert active_batch(OWNER) is None

    asyncio.run(main())


def test_batches_are_compared_by_identity():
    one = batch()
    assert one != dataclasses.replace(one)
    assert Batch(BarePlan()).slots is None


def test_the_context_cannot_be_changed_through_the_mapping():
    # A scope makes a new mapping: one that an older context holds does not change under it.
    with BatchScope(OWNER, batch()):
        first = active_batch(OWNER)
        with BatchScope(OTHER, batch()):
            assert active_batch(OWNER) is first
        assert active_batch(OTHER) is None
