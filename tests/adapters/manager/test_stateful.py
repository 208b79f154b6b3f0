"""Random histories, from several threads, against what must be true whatever the order."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from branchline.adapters.tiers import Eviction, TierLimits
from branchline.core.errors import (
    AdapterCapacityError,
    AdapterExistsError,
    AdapterNotFoundError,
)
from tests.adapters.manager.conftest import World, write_adapter

NAMES = st.sampled_from("abcd")
RANKS = (1, 2, 2, 4, 4)
CONTENTS = st.integers(0, len(RANKS) - 1)
SLOTS = {2: 1, 4: 2}
#: The slots that any content fits, without spares.
LARGE = 2


@cache
def folders() -> list[Path]:
    root = Path(tempfile.mkdtemp(prefix="branchline-test-"))
    return [write_adapter(root / str(i), 100 + i, rank) for i, rank in enumerate(RANKS)]


@cache
def expected() -> tuple[torch.Tensor, list[torch.Tensor]]:
    w = World(TierLimits({4: len(RANKS)}))
    for i, folder in enumerate(folders()):
        w.manager.load(str(i), folder)
    return w.answer(), [w.answer(str(i)) for i in range(len(RANKS))]


def assert_empty(w: World) -> None:
    for info in w.manager.list():
        w.manager.unload(info.name, timeout=10)
    memory = w.manager.memory()
    assert memory.slots_taken == memory.host_bytes == memory.host_adapters == 0
    assert w.tensors() == []
    assert w.manager.draining() == ()
    assert not w.manager._store._by_digest
    assert len(w.registry.branches(next(iter(w.registry)))) == 0
    for layer in w.registry:
        if layer.branch is not None:
            assert not layer.branch.low_rank.ranks.any()
    assert torch.equal(w.answer(), expected()[0])


class InFlight:
    """A batch in a thread of its own, which answers when it is told to."""

    def __init__(self, w: World, name: str, content: int) -> None:
        self.content = content
        self.refused = False
        self.answer: torch.Tensor | None = None
        self._entered, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(w, name))
        self._thread.start()
        assert self._entered.wait(10)

    @torch.no_grad()
    def _run(self, w: World, name: str) -> None:
        try:
            with w.manager.rows([name]):
                self._entered.set()
                assert self._leave.wait(30)
                self.answer = w.forward()
        except AdapterCapacityError:
            self.refused = True
        finally:
            self._entered.set()

    def end(self) -> None:
        self._leave.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


class Manager(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.w = World(TierLimits(SLOTS, 2, None, Eviction.LRU))
        self.names: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.batches: list[InFlight] = []

    @rule(name=NAMES, content=CONTENTS, lazily=st.booleans())
    def load(self, name: str, content: int, lazily: bool) -> None:
        begin = self.w.manager.register if lazily else self.w.manager.load
        try:
            begin(name, folders()[content])
        except AdapterExistsError:
            assert name in self.names
        else:
            assert name not in self.names
            self.names[name] = content

    @rule(name=NAMES, content=CONTENTS)
    def swap(self, name: str, content: int) -> None:
        try:
            self.w.manager.swap(name, folders()[content])
        except AdapterNotFoundError:
            assert name not in self.names
        except AdapterCapacityError:
            assert self.pinned or self.batches
        else:
            self.names[name] = content

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        try:
            self.w.manager.unload(name)
        except AdapterNotFoundError:
            assert name not in self.names
        else:
            del self.names[name]
            self.pinned.discard(name)

    @rule(name=NAMES, on=st.booleans())
    def pin(self, name: str, on: bool) -> None:
        try:
            (self.w.manager.pin if on else self.w.manager.unpin)(name)
        except AdapterNotFoundError:
            assert name not in self.names
        except AdapterCapacityError:
            assert len(self.pinned) > 1
        else:
            (self.pinned.add if on else self.pinned.discard)(name)

    @rule(name=NAMES)
    def prefetch(self, name: str) -> None:
        if name in self.names:
            self.w.manager.prefetch([name])[0].result(10)

    @rule(name=NAMES)
    def forward(self, name: str) -> None:
        try:
            answer = self.w.answer(name)
        except AdapterNotFoundError:
            assert name not in self.names
        except AdapterCapacityError:
            assert len(self.batches) + len(self.pinned) >= LARGE
        else:
            assert torch.equal(answer, expected()[1][self.names[name]])

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def forward_in_threads(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.names)), min_size=3, max_size=3))
        batches = [InFlight(self.w, name, self.names[name]) for name in names]
        for batch in batches:
            batch.end()
            self.check(batch)

    @precondition(lambda self: self.names and len(self.batches) < 3)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.batches.append(InFlight(self.w, name, self.names[name]))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        batch.end()
        self.check(batch)

    def check(self, batch: InFlight) -> None:
        if not batch.refused:
            assert batch.answer is not None
            assert torch.equal(batch.answer, expected()[1][batch.content])

    @invariant()
    def the_names_are_known(self) -> None:
        infos = {info.name: info for info in self.w.manager.list()}
        assert infos.keys() == self.names.keys()
        assert {name for name, info in infos.items() if info.pinned} == self.pinned
        slots = [(info.slot, info.digest) for info in infos.values() if info.slot is not None]
        assert len({slot for slot, _ in slots}) == len(set(slots))
        assert torch.equal(self.w.answer(), expected()[0])

    @invariant()
    def the_counts_add_up(self) -> None:
        store = self.w.manager._store
        kept = [v for v in store._by_digest.values() if v.weights is not None]
        assert store.host.count == len(kept)
        assert store.host.nbytes == sum(version.nbytes for version in kept)
        for slots in store.device._classes:
            held = [v for v in store._by_digest.values() if v.slot in slots.occupied]
            assert len(slots.occupied) == len(held)
            assert slots.draining == sum(version.drains for version in held)
            # A draining version that a name takes up again may leave no spare slot, as long as
            # nobody can be evicted for one.
            stuck = slots.queue.first(lambda version: not version.batches) is None
            assert slots.free or slots.draining or stuck
            assert {v for v in held if v in slots.queue} == {v for v in held if not v.pinned}

    def teardown(self) -> None:
        for batch in self.batches:
            batch.end()
            self.check(batch)
        assert_empty(self.w)
        self.w.manager.close()


Manager.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestManager = Manager.TestCase

OPERATION = st.one_of(
    st.tuples(st.just("load"), NAMES, CONTENTS),
    st.tuples(st.just("register"), NAMES, CONTENTS),
    st.tuples(st.just("swap"), NAMES, CONTENTS),
    st.tuples(st.just("unload"), NAMES),
    st.tuples(st.just("reload"), NAMES),
    st.tuples(st.just("pin"), NAMES),
    st.tuples(st.just("unpin"), NAMES),
    st.tuples(st.just("forward"), NAMES),
    st.tuples(st.just("forward"), NAMES),
)
REFUSALS = (AdapterExistsError, AdapterNotFoundError, AdapterCapacityError)


@given(histories=st.lists(st.lists(OPERATION, min_size=3, max_size=8), min_size=3, max_size=3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_operations_of_several_threads_at_once(histories):
    w = World(TierLimits(SLOTS, 2, None, Eviction.LFU))
    answers: list[torch.Tensor] = []

    def forward(name: str) -> None:
        answers.append(w.answer(name))

    calls: dict[str, Callable] = {"forward": forward}
    for name in ("load", "register", "swap", "unload", "reload", "pin", "unpin"):
        calls[name] = getattr(w.manager, name)

    @torch.no_grad()
    def run(history: list[tuple]) -> None:
        for what, name, *content in history:
            try:
                calls[what](name, *(folders()[index] for index in content))
            except REFUSALS:
                continue

    with ThreadPoolExecutor(len(histories)) as pool:
        for future in [pool.submit(run, history) for history in histories]:
            future.result(30)
    for answer in answers:
        assert any(torch.equal(answer, right) for right in expected()[1])
    assert all(info.batches == 0 for info in w.manager.list())
    assert_empty(w)
