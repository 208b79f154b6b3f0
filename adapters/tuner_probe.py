"""Finding out what a PEFT layer of any type needs of its input, by watching it.

The layer is copied, its adapter filled with noise (most types begin as an exact zero), and its base
made to answer the same numbers whatever it is fed.  What then still follows the input reads it
beside the base.  Whether the base is called, with what, and whether its weight is touched, tells
the rest.  Nothing that is known of a type enters, so the probe classes a type that nobody here has
heard of; where it cannot tell, it answers that the raw input is read, which is always safe.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from .lowering.base import Effect

_NOISE = 0.05
# What a forward of unknown code may raise on inputs that it does not expect.
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Probed:
    """What was found out about one layer.

    Args:
        effect: None where the layer passes the base's output on unchanged, having no live adapter.
        reason: what was seen.
        reads_weight: whether the result follows the base's weight by another way than the base's
            own forward: a quantised base must then hand out a dequantised one.
    """

    effect: Effect | None
    reason: str
    reads_weight: bool = False


@dataclass
class _Run:
    """One forward of the copied layer.

    Args:
        output: what came out.
        fed: what the base was fed, call by call.
        edited: whether the base was found with another weight than at rest.
    """

    output: torch.Tensor
    fed: list[torch.Tensor] = field(default_factory=list)
    edited: bool = False


@dataclass(frozen=True)
class _Seen:
    """All that was watched.

    Args:
        runs: with one input and with another.
        given: those inputs.
        constant: what the base answered.
        follows_base: whether the first output follows the base's matrices, and its parameters.
    """

    runs: list[_Run]
    given: tuple[torch.Tensor, torch.Tensor]
    constant: torch.Tensor
    follows_base: list[bool]


def probe(layer: nn.Module) -> Probed:
    """Class a tuner layer over a linear; the layer itself is not run, and not changed.

    Args:
        layer: as PEFT put it in the place of an `nn.Linear` or `Conv1D`.

    Returns:
        `Effect.RAW` where in doubt, with the reason.
    """
    if not isinstance(layer, BaseTunerLayer):
        return _doubt("is no layer of a PEFT tuner")
    if layer.disable_adapters or layer.merged or not layer.active_adapters:
        return Probed(None, "has no adapter that is active, enabled and not merged")
    base = layer.get_base_layer()
    sizes = _sizes(base)
    if sizes is None:
        return _doubt(f"its base, a {type(base).__name__}, is no linear")
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad():
            # In float64, so that no small dependence is rounded away.
            return _watch(copy.deepcopy(layer).to("cpu", torch.float64).eval(), *sizes)
    except _REFUSALS as error:
        return _doubt(f"its forward could not be watched: {type(error).__name__}: {error}")


def _doubt(reason: str) -> Probed:
    return Probed(Effect.RAW, f"in doubt: {reason}")


def _sizes(base: nn.Module) -> tuple[int, int] | None:
    """K and N."""
    if isinstance(base, Conv1D):
        return base.weight.shape[0], base.weight.shape[1]
    if isinstance(base, nn.Linear):
        return base.in_features, base.out_features
    return None


def _watch(layer: nn.Module, inputs: int, outputs: int) -> Probed:
    assert isinstance(layer, BaseTunerLayer)
    base = layer.get_base_layer()
    generator = torch.Generator().manual_seed(0)
    _fill_with_noise(layer, base, generator)
    # Numbers that every dtype holds: a tuner that casts its input has not changed it.
    first, second = (
        torch.randn(2, 3, inputs, generator=generator).bfloat16().double() for _ in range(2)
    )
    constant = torch.randn(2, 3, outputs, generator=generator).double()

    runs = [_run(layer, base, x, constant) for x in (first, second)]
    if not all(run.output.isfinite().all() for run in runs):
        return _doubt("the output is not finite")
    seen = _Seen(runs, (first, second), constant, [])
    for matrices_only in (True, False):
        with _other_numbers(base, matrices_only, generator):
            output = _run(layer, base, first, constant).output
        seen.follows_base.append(not torch.equal(output, runs[0].output))
    found = _conclude(seen)
    if found is not None:
        return found
    # Asked last: a type of which nothing is known may keep its adapters elsewhere.
    if layer._get_available_adapters() & set(layer.active_adapters):
        return _doubt("a live adapter changed nothing")
    return Probed(None, "holds no active adapter, and changes nothing")


def _conclude(seen: _Seen) -> Probed | None:
    """None where the base's output came out as it was."""
    first, second = seen.runs
    reads_weight, reads_base = seen.follows_base
    if first.edited or second.edited:
        return Probed(Effect.EDIT, "the base's weight was another during the forward")
    if not first.fed and not second.fed:
        if reads_base:
            reason = "the base is not called, and the output follows its weight or bias"
            return Probed(Effect.BYPASS, reason, reads_weight)
        return Probed(Effect.RAW, "the base is not called, and nothing of it read")
    for run, x in zip(seen.runs, seen.given, strict=True):
        if not all(_same(fed, x) for fed in run.fed):
            reason = "the base is fed something else than the input"
            return Probed(Effect.INPUT, reason, reads_weight)
    if not torch.equal(first.output, second.output):
        reason = "the output follows the input past the base"
        return Probed(Effect.RAW, reason, reads_weight)
    if torch.equal(first.output, seen.constant.to(first.output.dtype)):
        return None
    return Probed(Effect.OUTPUT, "the output follows the base's output only", reads_weight)


def _fill_with_noise(layer: nn.Module, base: nn.Module, generator: torch.Generator) -> None:
    own = {id(parameter) for parameter in base.parameters()}
    for parameter in layer.parameters():
        if id(parameter) not in own and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((_NOISE * noise).to(parameter.dtype))


def _run(layer: nn.Module, base: nn.Module, x: torch.Tensor, constant: torch.Tensor) -> _Run:
    at_rest = _weights(base)
    fed: list[torch.Tensor] = []
    edited = False

    def spy(given: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        nonlocal edited
        fed.append(given.clone())
        edited = edited or not _equal(_weights(base), at_rest)
        # A stub for any number of rows: some tuners flatten them.
        return constant.reshape(-1, constant.shape[-1]).reshape(*given.shape[:-1], -1).clone()

    torch.manual_seed(0)
    base.forward = spy
    try:
        output = layer(x.clone())
    finally:
        del base.forward
    return _Run(output, fed, edited or not _equal(_weights(base), at_rest))


def _weights(base: nn.Module) -> list[torch.Tensor]:
    """Copies of weight and bias, through a parametrization that may have been laid over them."""
    found = (getattr(base, "weight", None), getattr(base, "bias", None))
    return [tensor.clone() for tensor in found if isinstance(tensor, torch.Tensor)]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@contextmanager
def _other_numbers(
    base: nn.Module, matrices_only: bool, generator: torch.Generator
) -> Iterator[None]:
    """With other numbers in the copied base's parameters, or only in those that are matrices.

    A bias is not the weight: no quantised kernel hides it.
    """
    changed = [parameter for parameter in base.parameters() if parameter.ndim > matrices_only]
    saved = [(parameter, parameter.clone()) for parameter in changed]
    for parameter in changed:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise.to(parameter.dtype))
    try:
        yield
    finally:
        for parameter, value in saved:
            parameter.copy_(value)


def _same(fed: torch.Tensor, given: torch.Tensor) -> bool:
    return fed.numel() == given.numel() and torch.equal(fed.reshape(given.shape).to(given), given)
