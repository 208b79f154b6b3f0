"""Triton's interpreter, with less waiting and without its warnings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest


@contextmanager
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Silence about infinities; and less waiting.

    The interpreter replaces `triton.language` anew at each call of a function within a kernel,
    which takes longer than the function.  What the launch has replaced serves them as well.
    """
    from triton.runtime import interpreter

    prepared = set()

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    with np.errstate(all="ignore"):
        yield
