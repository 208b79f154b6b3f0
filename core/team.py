"""The worker threads that OpenMP keeps for every thread that computes.

GNU's OpenMP gives each thread that ran a parallel kernel, torch's or ours, idle workers of its own.
Where all of these together are more than there are processors, it lets none of them wait awake:
between two kernels they fall asleep, and every small kernel has to wake them first.  A step of the
engine then takes up to twice as long, because some other thread once computed something.  So
whoever has computed, and will not soon again, lets its workers go; the next kernel makes new ones.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from . import native

_P = ParamSpec("_P")
_T = TypeVar("_T")


#: The thread that goes on after a fork: it holds workers that only the parent has, and would wait
#: for their end forever.
_forked: set[int] = set()


def _remember_fork() -> None:
    _forked.clear()
    _forked.add(threading.get_ident())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember_fork)


def let_workers_go() -> None:
    """End the idle workers of the calling thread.

    Does nothing where OpenMP is not GNU's, or absent, nor in the thread that a fork goes on in.
    """
    functions = native.load().functions
    if functions is not None and threading.get_ident() not in _forked:
        functions.bl_let_workers_go()


def then_alone(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """`call`, which leaves its thread without workers."""

    @functools.wraps(call)
    def alone(*arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return call(*arguments, **named)
        finally:
            let_workers_go()

    return alone


class SideThreads(ThreadPoolExecutor):
    """Threads for what is done beside the forwards: between two calls they keep no workers."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """As of the base class."""

        def alone() -> _T:
            try:
                return fn(*args, **kwargs)
            finally:
                let_workers_go()

        return super().submit(alone)
