"""What a kernel reads: codes and scales, and nothing else; of a raw activation, its own codes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from branchline.core.quantized_activation import RawOutput
from branchline.core.scheme import SCHEMES
from branchline.linear.kernels import base
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.native_fp8 import NativeFp8Linear
from branchline.linear.kernels.torch_scaled import TorchScaledLinear

from .cases import NAME, activation, assert_same, codes_for, pair

#: Kernels that compute on a CPU, with the schemes they compute there.
RUNS = [
    *((EmulatedLinear, name) for name, scheme in SCHEMES.items() if scheme.input),
    *((NativeFp8Linear, n) for n, s in SCHEMES.items() if s.input and n != "nvfp4"),
    (TorchScaledLinear, "fp8-static"),
    (TorchScaledLinear, "fp8-dynamic"),
]


@pytest.fixture
def quantisations(monkeypatch) -> list[str]:
    """Who quantised an activation."""
    seen: list[str] = []
    quantize = base.quantize_input

    def counting(x, contract, consumer):
        seen.append(consumer)
        return quantize(x, contract, consumer)

    monkeypatch.setattr(base, "quantize_input", counting)
    return seen


@pytest.mark.parametrize(("kernel", "scheme"), RUNS, ids=lambda v: getattr(v, "name", v))
def test_codes_are_taken_as_they_are_and_raw_is_not_read(kernel, scheme, quantisations):
    made = pair(kernel, SCHEMES[scheme], 192, 128, torch.bfloat16)
    x = activation(5, 128)
    codes = codes_for(x, made.kernel)
    poison = RawOutput(torch.full_like(x, float("nan")))
    poisoned = dataclasses.replace(codes, data=codes.codes, raw=poison)
    out = made.kernel.apply(poisoned, NAME)
    assert bool(out.isfinite().all())
    assert quantisations == []
    assert_same(made.kernel.apply(x, NAME), out)
    assert quantisations == [NAME]


@pytest.mark.parametrize(("kernel", "scheme"), RUNS, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_plain_and_quantised_input_give_the_same_bytes(kernel, scheme, rows):
    # The others are torch's own, which take tens of times as long on a CPU.
    sizes = ((64, 192), (576, 64), (192, 1368)) if kernel is NativeFp8Linear else ((64, 192),)
    for k, n in sizes:
        made = pair(kernel, SCHEMES[scheme], n, k)
        x = activation(rows, k)
        assert_same(made.kernel.apply(x, NAME), made.kernel.apply(codes_for(x, made.kernel), NAME))
