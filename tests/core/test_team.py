"""Workers of OpenMP: those of a thread that has computed end when it says so."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from branchline.core import native
from branchline.core.team import SideThreads, let_workers_go, then_alone

THREADS = 4

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists()
    or "gomp" not in Path("/proc/self/maps").read_text(encoding="utf-8"),
    reason="neither Linux nor GNU's OpenMP",
)


@pytest.fixture(autouse=True)
def _four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def compute() -> None:
    """A kernel of torch's that several threads share."""
    torch.ones(512, 512, dtype=torch.float64).exp_()


def test_a_thread_that_lets_its_workers_go_has_none_and_can_compute_again():
    counts = []

    def run() -> None:
        for _ in range(2):
            compute()
            counts.append(tasks())
            let_workers_go()
            counts.append(tasks())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    with_workers, without, again, at_last = counts
    assert with_workers - without == THREADS - 1
    assert again == with_workers
    assert at_last == without


def test_side_threads_keep_no_workers_between_two_calls():
    def settled() -> int:
        # The executor's thread has finished the call before when it begins this one.
        return threads.submit(tasks).result()

    with SideThreads(1, "side") as threads:
        before = settled()
        assert threads.submit(lambda: (compute(), tasks())[1]).result() == before + THREADS - 1
        assert settled() == before


def test_results_and_errors_pass_through():
    @then_alone
    def told(value: int) -> int:
        """Its words."""
        if value < 0:
            raise ValueError("below")
        return value

    assert told(3) == 3
    assert told.__doc__ == "Its words."
    with pytest.raises(ValueError, match="below"):
        told(-1)


_FORK = """
import os, sys, threading, torch
from branchline.core.team import let_workers_go
torch.set_num_threads(4)
torch.ones(512, 512, dtype=torch.float64).exp_()
child = os.fork()
if not child:
    let_workers_go()
    beside = threading.Thread(target=lambda: (torch.ones(512, 512).exp_(), let_workers_go()))
    beside.start()
    beside.join()
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_wait_for_the_workers_of_its_parent():
    assert subprocess.run([sys.executable, "-c", _FORK], timeout=60, check=False).returncode == 7


def test_without_the_library_nothing_happens(monkeypatch):
    absent = native.NativeLibrary("", "not built", None)
    monkeypatch.setattr(native, "load", lambda: absent)
    let_workers_go()
