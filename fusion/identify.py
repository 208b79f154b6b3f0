"""Proof by equality: what a piece of a model computes, found by running it on probes (I4).

Class names and attribute names prove nothing.  A unary activation is compared on all 65,536
encodings of its two-byte dtype, a gated one also on a spread of pairs, a norm on rows that tell
the known rounding orders, and ``w`` from ``1 + w``, apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..core.oracle import (
    ACTIVATIONS,
    ActivationSemantics,
    NormSemantics,
    Semantics,
    activate,
    inverse_rms,
    rms_norm,
    scale_rows,
)

_SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 448.0, -3300.0, 1e-40, -6e-8, 3e38, float("inf"))


#: What code of a model may raise when it is handed a probe it was not written for.
PROBE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)


class Finding(NamedTuple):
    """What a probe found: semantics, or the reason why there are none."""

    semantics: Semantics | None
    reason: str = ""


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: equal to the bit, or both NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return torch.zeros(a.shape, dtype=torch.bool, device=a.device)
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.view(as_int) == b.view(as_int)) | (a.isnan() & b.isnan())


def all_encodings(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Every value of a two-byte float dtype, (65536,); for float32, those of bfloat16 widened."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    if dtype == torch.float32:
        return codes.view(torch.bfloat16).float()
    return codes.view(dtype)


def identify_activation(
    function: Callable[..., torch.Tensor],
    arity: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[Finding, tuple[int, ...]]:
    """Which activation `function` computes.

    Args:
        function: takes `arity` tensors of one shape and returns one.
        arity: 1, or 2 for a gated activation.
        dtype: dtype it will be run in.
        device: where it will be run.

    Returns:
        the finding, and the order of the function's arguments as (gate, up).
    """
    if arity not in (1, 2):
        return Finding(None, f"reads {arity} tensors"), ()
    # Three dimensions: what moves elements about, or counts dimensions, is no activation.
    encodings = all_encodings(dtype, device).view(2, 128, 256)
    try:
        return _match_activation(function, arity, dtype, encodings)
    except PROBE_ERRORS as error:
        return Finding(None, f"fails on a probe: {type(error).__name__}: {error}"), ()


def _match_activation(
    function: Callable[..., torch.Tensor], arity: int, dtype: torch.dtype, encodings: torch.Tensor
) -> tuple[Finding, tuple[int, ...]]:
    for order in [(0,)] if arity == 1 else [(0, 1), (1, 0)]:
        for name in ACTIVATIONS:
            semantics = ActivationSemantics(name, gated=arity == 2)
            if _equals(function, semantics, order, encodings):
                return Finding(semantics), order
    known = ", ".join(ACTIVATIONS)
    return Finding(None, f"equals none of {known} on all encodings of {dtype}"), ()


def _equals(
    function: Callable[..., torch.Tensor],
    semantics: ActivationSemantics,
    order: tuple[int, ...],
    encodings: torch.Tensor,
) -> bool:
    # A sample first: what is another activation shows it at once.
    for values in (encodings[:, ::8, ::16].contiguous(), encodings):
        for probe in _probes(semantics.gated, values):
            expected = activate(semantics, *probe)
            given = [value.clone() for value in probe]
            out = function(*(given[i] for i in order))
            if not isinstance(out, torch.Tensor) or not bool(same_bytes(out, expected).all()):
                return False
            if not all(bool(same_bytes(g, p).all()) for g, p in zip(given, probe, strict=True)):
                # It writes its input, which others may read.
                return False
    return True


def _probes(gated: bool, encodings: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    if not gated:
        yield (encodings,)
        return
    yield encodings, torch.ones_like(encodings)
    yield torch.ones_like(encodings), encodings
    flat = encodings.flatten()
    yield encodings, flat[_permutation(flat.numel(), flat.device)].view_as(encodings)
    special = torch.tensor(_SPECIAL, dtype=flat.dtype, device=flat.device)
    turns = torch.arange(flat.numel(), device=flat.device)
    for offset in (0, 4):
        yield encodings, special[(turns + offset) % special.numel()].view_as(encodings)


def _permutation(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(count, generator=generator).to(device)


# --- norms -------------------------------------------------------------------------------------


def identify_norm(module: nn.Module, columns: int, dtype: torch.dtype) -> Finding:
    """Which RMSNorm `module` computes.

    Args:
        module: takes (..., columns) and returns the same shape.
        columns: the normalised dimension.
        dtype: dtype it will be run in.

    The order of float32 summation is not part of the answer: elements whose value lies within
    float32 noise of a rounding tie are left out of the comparison.
    """
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    if weight is None or weight.shape != (columns,) or parameters:
        return Finding(None, f"{type(module).__qualname__} has not just one weight per column")
    if weight.dtype != dtype:
        return Finding(None, f"its weight is {weight.dtype}, the activation {dtype}")
    probes = _norm_probes(columns, dtype, weight.device)
    given = probes.clone()
    try:
        out = module(given)
    except PROBE_ERRORS as error:
        return Finding(None, f"fails on a probe: {type(error).__name__}: {error}")
    if not isinstance(out, torch.Tensor) or out.shape != probes.shape or out.dtype != dtype:
        return Finding(None, f"{type(module).__qualname__} does not return what it was given")
    if not bool(same_bytes(given, probes).all()):
        return Finding(None, f"{type(module).__qualname__} writes its input")
    for eps in _epsilons(module):
        for order in ("llama", "gemma"):
            semantics = NormSemantics(order, eps)
            if _norm_equals(semantics, probes, weight.detach(), out):
                return Finding(semantics)
    return Finding(None, f"{type(module).__qualname__} equals no known order of RMSNorm on probes")


def _epsilons(module: nn.Module) -> list[float]:
    return sorted(
        {
            value
            for name, value in vars(module).items()
            if isinstance(value, float) and "eps" in name
        }
    )


def _norm_probes(columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-7, 8, (24, columns), generator=generator).float()
    integers[:, 0] = 7.0
    # Magnitudes where epsilon rules, where it counts, and where it vanishes.
    magnitudes = 2.0 ** torch.linspace(-20, 12, 24).round()
    gaussian = torch.randn(24, columns, generator=generator) * magnitudes[:, None]
    largest = torch.finfo(dtype).max
    rows = torch.cat([integers * magnitudes[:, None], gaussian]).clamp(-6e4, 6e4)
    # A single spike comes out as sqrt(columns), which tells limits on the output; what is not
    # finite, and the largest, tell limits on the input.
    spikes = torch.zeros(8, columns)
    for row, value in enumerate((1.0, -300.0, 6e4, largest, torch.inf, -torch.inf, torch.nan)):
        spikes[row, row % columns] = value
    full = torch.tensor([largest, -largest, 1e-40, 6e-8, 0.0, -0.0]).view(6, 1).expand(6, columns)
    return torch.cat([rows, spikes, full]).view(2, -1, columns).to(dtype).to(device)


def _norm_equals(
    semantics: NormSemantics, probes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> bool:
    expected = rms_norm(semantics, probes, weight)
    if probes.dtype == torch.float32:
        return bool(torch.allclose(out, expected, rtol=2e-6, atol=1e-40, equal_nan=True))
    inverse = inverse_rms(semantics, probes)
    settled = torch.ones_like(out, dtype=torch.bool)
    for nudge in (1 - 2.0**-20, 1 + 2.0**-20):
        settled &= same_bytes(scale_rows(semantics, probes, inverse * nudge, weight), expected)
    same = same_bytes(out, expected)
    return bool((same | ~settled).all()) and bool(settled.float().mean() > 0.98)
