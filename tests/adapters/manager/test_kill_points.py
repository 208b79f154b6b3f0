"""A failure at any step of any operation: what was served before is served after, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from branchline.adapters import ready, store
from branchline.adapters.branch import LayerBranch
from branchline.adapters.tiers import device
from branchline.adapters.tiers.disk import DiskTier
from branchline.adapters.version import AdapterInfo

#: Whatever can fail in an operation, by where it is looked up.
READING = (DiskTier, "read")
STEPS = [
    (store, "check_range"),
    (store.VersionStore, "_footprint"),
    (device, "make_branch"),
    (LayerBranch, "write"),
    (LayerBranch, "clear"),
    (ready, "slots_by_place"),
]


class Tripwire:
    """Counts the steps and fails at one of them."""

    def __init__(self, monkeypatch, error: BaseException) -> None:
        self.error = error
        self.left: int | None = None
        for owner, name in [READING, *([] if isinstance(error, OSError) else STEPS)]:
            monkeypatch.setattr(owner, name, self._guarded(getattr(owner, name)))

    def _guarded(self, function: Callable) -> Callable:
        def step(*args, **kwargs):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    raise self.error
            return function(*args, **kwargs)

        return step


def state(w) -> tuple:
    """What an operation that failed may not have changed."""
    infos = [(i.name, i.digest, i.source, i.state, i.pinned, i.batches) for i in w.manager.list()]
    return infos, w.manager.draining(), w.manager.memory().host_bytes


def drop(info: AdapterInfo) -> None:
    """An operation gives the listing's line; none of the tests looks at it."""


OPERATIONS = {
    "load": lambda w, a: drop(w.manager.load("new", a("new", layers=("model.first",)))),
    "load an alias": lambda w, a: drop(w.manager.load("new", a("a"))),
    "install": lambda w, a: drop(w.manager.install("new", w.manager._read(a("new")))),
    "swap": lambda w, a: drop(w.manager.swap("a", a("new"))),
    "swap one on disk": lambda w, a: drop(w.manager.swap("c", a("new"))),
    "reload": lambda w, a: drop(w.manager.reload("a")),
    "pin": lambda w, a: drop(w.manager.pin("c")),
    "unload": lambda w, a: w.manager.unload("a"),
    "evict": lambda w, a: w.answer("c"),
    "evict two": lambda w, a: w.answer("c", "d"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "error",
    [OSError("input/output error"), torch.OutOfMemoryError("out of memory")],
    ids=lambda error: type(error).__name__,
)
def test_every_step_may_fail(world, adapter, monkeypatch, operation, error):
    wire = Tripwire(monkeypatch, error)
    run, failures = OPERATIONS[operation], 0
    for step in range(100):
        w = world(2, adapters=2)
        for name in "abcd":
            w.manager.load(name, adapter(name))
        expected = {name: w.answer(name) for name in "cdab"}
        base, before = w.answer(), state(w)
        wire.left = step
        try:
            run(w, adapter)
        except type(error):
            failures += 1
            wire.left = None
            if before[0] == state(w)[0]:
                assert state(w) == before
        else:
            if wire.left is not None:
                break
            # Emptying a slot that nobody reads may fail unseen; the operation was done by then.
            continue
        assert state(w)[:2] == before[:2]
        assert torch.equal(w.answer(), base)
        for _ in range(2):
            assert all(torch.equal(w.answer(name), expected[name]) for name in "abcd")
        # And what failed succeeds when it is tried again.
        run(w, adapter)
        survivors = {info.name for info in w.manager.list()}
        for name in survivors & set("bcd") - ({"c"} if "disk" in operation else set()):
            assert torch.equal(w.answer(name), expected[name])
        for name in survivors:
            w.manager.unload(name)
        assert w.manager.memory().slots_taken == w.manager.memory().host_bytes == 0
    else:
        raise AssertionError("the operation never came to its end")
    reads = operation not in ("unload", "install")
    assert failures or operation == "unload" or (isinstance(error, OSError) and not reads)


def test_a_failed_emptying_is_made_up_for(world, adapter, monkeypatch, caplog):
    w = world(1)
    w.manager.load("a", adapter("a"))
    base, answer = w.answer(), w.answer("a")
    with monkeypatch.context() as patch:

        def fail(self, slot):
            raise torch.OutOfMemoryError("out of memory")

        patch.setattr(LayerBranch, "clear", fail)
        w.manager.unload("a")
    assert "could not be emptied" in caplog.text
    assert w.manager.list() == ()
    assert torch.equal(w.answer(), base)
    w.manager.load("one", adapter("one", layers=("model.second",)))
    w.manager.load("two", adapter("two", layers=("model.second",)))
    assert torch.equal(w.answer("one")[:, :8], base[:, :8])
    w.manager.load("a", adapter("a"))
    assert torch.equal(w.answer("a"), answer)
    for name in ("one", "two", "a"):
        w.manager.unload(name)
    for layer in w.registry:
        assert not layer.branch.low_rank.ranks.any()


def test_a_listener_that_fails_stops_nothing(world, adapter, caplog):
    w = world(1)

    def listener(epoch, reason):
        raise RuntimeError(f"no: {reason}")

    w.registry.listen(listener)
    w.manager.load("a", adapter("a"))
    answer = w.answer("a")
    with w.manager.rows(["a"]):
        w.manager.swap("a", adapter("b"))
        assert torch.equal(w.forward(), answer)
    w.manager.unload("a")
    assert w.manager.list() == w.manager.draining() == ()
    for word in ("loaded", "swapped", "unloaded"):
        assert f"no: adapter 'a' was {word}" in caplog.text


def test_a_listener_may_ask_the_manager(world, adapter):
    w = world(1)
    seen = []
    w.registry.listen(lambda *_: seen.append([info.name for info in w.manager.list()]))
    w.manager.load("a", adapter("a"))
    w.manager.unload("a")
    assert seen == [["a"], []]


def test_a_plan_that_cannot_be_made_lets_go(world, adapter, monkeypatch):
    w = world(1)
    w.manager.load("a", adapter("a"))
    answer = w.answer("a")

    def fail(live, mixtures, batch):
        raise RuntimeError("no plan")

    with monkeypatch.context() as patch:
        patch.setattr(w.manager._batches, "_plan", fail)
        with pytest.raises(RuntimeError, match="no plan"):
            w.answer("a", "a")
    assert w.manager.info("a").batches == 0
    assert torch.equal(w.answer("a"), answer)
    w.manager.close()
