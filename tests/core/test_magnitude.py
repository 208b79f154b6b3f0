"""Largest magnitudes, by bits and by torch."""

from __future__ import annotations

import math

import pytest
import torch

from branchline.core import magnitude, native
from branchline.core.magnitude import magnitudes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("isa", range(native.load().functions.bl_best_isa() + 1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_torch(isa, dtype):
    functions = native.load().functions
    functions.bl_set_isa(isa)
    try:
        for count in (1, 2, 15, 16, 33, 1000):
            values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
            for place in {0, count // 2, count - 1}:
                for odd in (-7e4, math.inf, -math.inf, 6e-8, -0.0):
                    given = values.clone()
                    given[place] = odd
                    assert magnitudes([given]) == [given.abs().amax().item()]
                given = values.clone()
                given[place] = -math.nan
                assert math.isnan(magnitudes([given])[0])
    finally:
        functions.bl_set_isa(functions.bl_best_isa())


def test_many_at_once_and_none():
    given = [torch.full((3, 2), -2.5), torch.zeros(4), torch.empty(0, 3), torch.tensor(1.5)]
    assert magnitudes(given) == [2.5, 0.0, 0.0, 1.5]
    assert magnitudes([]) == []
    halves = [tensor.bfloat16() for tensor in given]
    assert magnitudes([*given, *halves]) == [2.5, 0.0, 0.0, 1.5] * 2


def test_what_the_kernels_do_not_read(monkeypatch):
    """Strided tensors, other dtypes, and machines without the C kernels."""
    wide = torch.tensor([[1.0, -8.0], [2.0, 4.0]])
    assert magnitudes([wide[:, 0], wide.double(), wide.T]) == [2.0, 8.0, 8.0]
    absent = native.NativeLibrary("", "absent", None)
    monkeypatch.setattr(magnitude.native, "load", lambda: absent)
    assert magnitudes([wide, torch.empty(0)]) == [8.0, 0.0]
    assert math.isnan(magnitudes([torch.tensor([1.0, math.nan, math.inf])])[0])
