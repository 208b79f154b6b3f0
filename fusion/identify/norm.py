"""Which norm a module computes."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ...core.oracle import NORM_ORDERS, NormSemantics, norm
from ...core.oracle.norm import RowStatistics, scale_rows, statistics
from .finding import PROBE_ERRORS, Finding, same_bytes

#: Elements of generic rows that must lie clear of every rounding tie: fewer would leave too much
#: unproved.  Ties of float16 lie eight times as close to one another.
_SETTLED_SHARE = {torch.bfloat16: 0.98, torch.float16: 0.94}

#: What a model's own float32 sums may be off by, relative to the mean of what they add up.
_SUM_NOISE = 2.0**-20
#: The same of two or three float32 operations on one element.
_ELEMENT_NOISE = 2.0**-22


def identify_norm(module: nn.Module, columns: int, dtype: torch.dtype) -> Finding:
    """Which norm `module` computes.

    Args:
        module: takes (..., columns) and returns the same shape.
        columns: the normalised dimension.
        dtype: float16, bfloat16 or float32: what it will be run in.

    The order of float32 summation is not part of the answer: elements whose value lies within
    float32 noise of a rounding tie are left out of the comparison.
    """
    name = type(module).__qualname__
    parameters = dict(module.named_parameters())
    reason = _unfit(parameters, columns, dtype)
    if reason:
        return Finding(None, f"{name} {reason}")
    vectors = tuple(parameters[n].detach() for n in ("weight", "bias") if n in parameters)
    generic = _generic_rows(columns)
    rows = torch.cat([generic, _odd_rows(columns, dtype)]).to(dtype).to(vectors[0].device)
    out = _run(module, rows.view(2, -1, columns))
    if isinstance(out, str):
        return Finding(None, out)
    bias = len(vectors) == 2
    orders = [order for order in NORM_ORDERS if order.startswith("layer_norm") or not bias]
    for eps, order in itertools.product(_epsilons(module), orders):
        semantics = NormSemantics(order, eps, bias)
        if _equals(semantics, rows, vectors, out.reshape(rows.shape), len(generic)):
            return Finding(semantics)
    return Finding(None, f"{name} equals no known norm on probes ({', '.join(NORM_ORDERS)})")


def _run(module: nn.Module, probes: torch.Tensor) -> torch.Tensor | str:
    """What `module` makes of `probes`, or why that is no norm's."""
    name = type(module).__qualname__
    given = probes.clone()
    try:
        out = module(given)
    except PROBE_ERRORS as error:
        return f"fails on a probe: {type(error).__name__}: {error}"
    if not isinstance(out, torch.Tensor) or (out.shape, out.dtype) != (probes.shape, probes.dtype):
        return f"{name} does not return what it was given"
    if not bool(same_bytes(given, probes).all()):
        return f"{name} writes its input"
    return out


def _unfit(parameters: dict[str, nn.Parameter], columns: int, dtype: torch.dtype) -> str:
    """Why parameters are not those of a norm; empty if they are."""
    if "weight" not in parameters:
        return "has no weight"
    others = set(parameters) - {"weight", "bias"}
    if others:
        return f"has more than a weight and a bias: {', '.join(sorted(others))}"
    for name, value in parameters.items():
        if value.shape != (columns,):
            return f"has a {name} of shape {tuple(value.shape)}, not one per column"
        if value.dtype != dtype:
            return f"has a {name} in {value.dtype}, the activation is {dtype}"
    return ""


def _epsilons(module: nn.Module) -> list[float]:
    return sorted(
        {
            value
            for name, value in vars(module).items()
            if isinstance(value, float) and "eps" in name
        }
    )


# --- probes --------------------------------------------------------------------------------------


def _generic_rows(columns: int) -> torch.Tensor:
    """Rows as models have them, float32 (56, columns)."""
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-7, 8, (32, columns), generator=generator).float()
    integers[:, 0] = 7.0
    # Magnitudes where epsilon rules, where it counts, and where it vanishes.
    magnitudes = 2.0 ** torch.linspace(-20, 12, 24).round()
    gaussian = torch.randn(24, columns, generator=generator) * magnitudes[:, None]
    # A mean that is large beside the spread: 7 to 121, all of them exact in two bytes.
    means = torch.linspace(0, 114, 8).round()[:, None]
    rows = [integers[:24] * magnitudes[:, None], gaussian, integers[24:] + means]
    return torch.cat(rows).clamp(-6e4, 6e4)


def _odd_rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows in which limits show, float32 (16, columns)."""
    largest = torch.finfo(dtype).max
    # A single spike comes out as sqrt(columns), which tells limits on the output; what is not
    # finite, and the largest, tell limits on the input.
    spikes = torch.zeros(9, columns)
    large = min(1e12, largest)
    values = (1.0, -300.0, 6e4, large, -large, largest, torch.inf, -torch.inf, torch.nan)
    for row, value in enumerate(values):
        spikes[row, row % columns] = value
    full = torch.tensor([largest, -largest, 100.0, 1e-40, 6e-8, 0.0, -0.0]).view(7, 1)
    return torch.cat([spikes, full.expand(7, columns)])


# --- comparison ----------------------------------------------------------------------------------


def _equals(
    semantics: NormSemantics,
    probes: torch.Tensor,
    vectors: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    generic: int,
) -> bool:
    """Whether `out` is `semantics` of probes (rows, K), whose first `generic` are generic."""
    expected = norm(semantics, (probes, *vectors)).out
    if probes.dtype == torch.float32 and not semantics.centered:
        return bool(torch.allclose(out, expected, rtol=2e-6, atol=1e-40, equal_nan=True))
    if semantics.centered:
        low, high = _centred_range(semantics, probes, vectors)
    else:
        low, high = _scaled_range(semantics, probes, vectors)
    if probes.dtype == torch.float32:
        anything = (low == -torch.inf) & (high == torch.inf)
        inside = (low <= out) & (out <= high)
        return bool((anything | inside | same_bytes(out, expected)).all())
    settled = same_bytes(low, expected) & same_bytes(high, expected)
    share = settled[:generic].float().mean()
    return bool((same_bytes(out, expected) | ~settled).all()) and bool(
        share > _SETTLED_SHARE[probes.dtype]
    )


def _scaled_range(
    semantics: NormSemantics, x: torch.Tensor, vectors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most an RMSNorm of `x` may be, for float32 noise of its sums."""
    mean, inverse = statistics(semantics, x)
    low, high = (
        scale_rows(semantics, x, RowStatistics(mean, inverse * nudge), *vectors)
        for nudge in (1 - _SUM_NOISE, 1 + _SUM_NOISE)
    )
    return low, high


def _centred_range(
    semantics: NormSemantics, x: torch.Tensor, vectors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most a LayerNorm of `x` may be, whatever order its float32 sums have.

    What cancels keeps the noise of what it was before: ``x - mean``, also where it is computed as
    ``x / std - mean / std``, and the sum with the bias.  All of it is in one width around the
    value, to either side, before the only rounding.
    """
    mean, inverse = (part.double() for part in statistics(semantics, x))
    gain = vectors[0] + 1 if semantics.order == "layer_norm_1p" else vectors[0]
    bias = vectors[1].double() if semantics.bias else torch.zeros_like(gain, dtype=torch.float64)
    wide, gain = x.double(), gain.double()
    scaled = (wide - mean) * inverse * gain
    size = wide.abs()
    of_sums = _SUM_NOISE * ((size.mean(-1, keepdim=True) * inverse * gain).abs() + scaled.abs())
    of_elements = _ELEMENT_NOISE * ((size + mean.abs()) * inverse * gain).abs()
    noise = of_sums + of_elements + _ELEMENT_NOISE * (scaled.abs() + bias.abs())
    # Never nothing: the sign of a zero depends on the order of the subtractions.
    noise = noise.clamp(min=torch.finfo(torch.float32).tiny)
    # Where float32 squares overflow, how far a sum comes depends on its order.
    overflows = size.square().sum(-1, keepdim=True) > torch.finfo(torch.float32).max
    overflows &= size.isfinite().all(-1, keepdim=True)
    noise = noise.masked_fill(overflows, torch.inf)
    value = (scaled + bias).masked_fill(overflows, 0.0)
    return (value - noise).float().to(x.dtype), (value + noise).float().to(x.dtype)
