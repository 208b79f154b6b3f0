"""Around every test of the C kernels."""

from __future__ import annotations

import pytest
import torch

from branchline.core import native as library
from branchline.linear import native, outputs


@pytest.fixture(autouse=True)
def _buffers_full_of_nan(monkeypatch):
    """A byte that nobody writes shows: no kernel writes these into codes, scales or products."""

    def full(shape, dtype, device):
        room = torch.empty(shape, dtype=dtype, device=device)
        room.view(torch.uint8).fill_(0xFF)
        return room

    monkeypatch.setattr(outputs, "empty", full)
    monkeypatch.setattr(native, "empty", full)


@pytest.fixture(autouse=True)
def _best_isa():
    yield
    functions = library.load().functions
    functions.bl_set_isa(functions.bl_best_isa())
