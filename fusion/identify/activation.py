"""Which activation a function computes: a known one, or any that is elementwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from ...core.oracle import ACTIVATIONS, ActivationSemantics, activate
from ...core.oracle.activation import FACTORS, LIMITS, OFFSETS, define_custom, gate_side, times_up
from .finding import PROBE_ERRORS, Finding, all_same_bytes, same_bytes
from .placing import (
    Values,
    all_encodings,
    anywhere,
    shuffled,
    special_values,
    whole_vectors,
)

#: Three dimensions: what moves elements about, or counts dimensions, is no activation.
_SHAPE = (2, 128, 256)

#: Offsets of `up` that are tried in any case: code may have written them down where no module and
#: no graph shows them.
_OFFSETS = (1.0,)

#: What the tail of an activation, where its parts cancel, may differ by; absolute.
_NEAR = 2.0**-18


class _UnfitError(Exception):
    """The function is no activation, whatever it computes; the text is the reason."""


def identify_activation(
    function: Callable[..., torch.Tensor],
    arity: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    numbers: Iterable[float] = (),
) -> tuple[Finding, tuple[int, ...]]:
    """Which activation `function` computes.

    Args:
        function: takes `arity` tensors of one shape and returns one.
        arity: 1, or 2 for a gated activation.
        dtype: float16, bfloat16 or float32: what it will be run in.
        device: where it will be run.
        numbers: what its limit, multiplier and offset may be, as found in its code; nothing is
            taken from them without proof.

    Returns:
        the finding, and the order of the function's arguments as (gate, up).

    An activation without a name becomes a custom one, if it is a function of single elements of a
    two-byte dtype: each gets the same bytes wherever it lies.
    """
    if arity not in (1, 2):
        return Finding(None, f"reads {arity} tensors"), ()
    try:
        return _identify(_Subject(function, arity, dtype, torch.device(device), tuple(numbers)))
    except _UnfitError as unfit:
        return Finding(None, str(unfit)), ()
    except PROBE_ERRORS as error:
        return Finding(None, f"fails on a probe: {type(error).__name__}: {error}"), ()


class _Subject(NamedTuple):
    """The function on trial, and where it runs."""

    function: Callable[..., torch.Tensor]
    arity: int
    dtype: torch.dtype
    device: torch.device
    numbers: tuple[float, ...]

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """Which of its arguments may be (gate, up)."""
        return [(0,)] if self.arity == 1 else [(0, 1), (1, 0)]

    def encodings(self) -> torch.Tensor:
        """All of them, `_SHAPE`."""
        return all_encodings(self.dtype, self.device).view(_SHAPE)

    def run(self, order: tuple[int, ...], probe: Values) -> torch.Tensor:
        """Its result on (gate, up).

        Raises:
            _UnfitError: it writes its input, or does not return a tensor like it.
        """
        before = [value.clone() for value in probe]
        out = self.function(*(probe[i] for i in order))
        if not isinstance(out, torch.Tensor) or out.shape != probe[0].shape:
            raise _UnfitError("does not return a tensor of the shape that it was given")
        if out.dtype != self.dtype:
            raise _UnfitError(f"returns {out.dtype} for {self.dtype}")
        if not all(all_same_bytes(p, b) for p, b in zip(probe, before, strict=True)):
            raise _UnfitError("writes its input, which others may read")
        return out


class _Form(NamedTuple):
    """What `up` is to the function, if it is an activation at all.

    Attributes:
        order: of its arguments, as (gate, up).
        offset: of `up`.
    """

    order: tuple[int, ...]
    offset: float | None = None


def _identify(subject: _Subject) -> tuple[Finding, tuple[int, ...]]:
    sides = dict(_forms(subject))
    for form, side in sides.items():
        probe, seen = map(_sample, (_gate_probe(subject, form.offset), (side,)))
        for semantics in _candidates(subject, form):
            if _resembles(semantics, probe, *seen) and _is_known(subject, form.order, semantics):
                return Finding(semantics), form.order
    known = f"equals none of {', '.join(ACTIVATIONS)} on all encodings of {subject.dtype}"
    if subject.dtype.itemsize != 2:
        return Finding(None, known), ()
    for form, side in sides.items():
        order = form.order
        for semantics in _custom(subject, form, side):
            if not _equals(subject, order, semantics, _probes(subject, semantics)):
                continue
            if _is_elementwise(subject, order, semantics):
                return Finding(semantics), order
            return Finding(None, f"{known}, and gives an element other bytes elsewhere"), ()
    kind = "act(gate) * up, of single elements" if subject.arity == 2 else "made element by element"
    return Finding(None, f"{known}, and is not {kind}"), ()


def _gate_probe(subject: _Subject, offset: float | None) -> Values:
    """Shows the gate's side: all encodings, times what is one after the offset."""
    encodings = subject.encodings()
    ones = torch.full_like(encodings, 1.0 - (offset or 0.0))
    return (encodings, ones)[: subject.arity]


def _forms(subject: _Subject) -> Iterator[tuple[_Form, torch.Tensor]]:
    """Forms worth trying, with the gate's side that each has.

    An offset is worth it if `up`, where it cancels the offset, takes the product with it.  A limit
    below the offset hides that: such a function is not found.
    """
    for offset, order in itertools.product(_offsets(subject), subject.orders):
        side = subject.run(order, _gate_probe(subject, offset))
        if subject.arity == 2:
            none_left = torch.full_like(side, -(offset or 0.0))
            expected = times_up(_linear(offset), side, none_left)
            if not all_same_bytes(subject.run(order, (subject.encodings(), none_left)), expected):
                continue
        yield _Form(order, offset), side


def _offsets(subject: _Subject) -> tuple[float | None, ...]:
    if subject.arity == 1:
        return (None,)
    least, most = OFFSETS
    usable = _usable((*subject.numbers, *_OFFSETS), torch.float32)
    # Of a number in a sum torch takes the nearest of the dtype on a CPU, where in a product it
    # takes the nearest float32.
    rounded = torch.tensor(usable, dtype=torch.float64).to(subject.dtype).tolist()
    offsets = sorted({n for n in (*usable, *rounded) if least <= abs(n) <= most})
    return (None, *offsets)


def _linear(offset: float | None) -> ActivationSemantics:
    return ActivationSemantics("identity", gated=True, up_offset=offset)


# --- candidates ----------------------------------------------------------------------------------


def _candidates(subject: _Subject, form: _Form) -> Iterator[ActivationSemantics]:
    least, most = FACTORS
    usable = _usable(subject.numbers, torch.float32)
    factors = [n for n in usable if least <= abs(n) <= most and n != 1.0]
    for limit, factor, name in itertools.product(_limits(subject), (None, *factors), ACTIVATIONS):
        yield ActivationSemantics(name, subject.arity == 2, limit, factor, form.offset)


def _custom(subject: _Subject, form: _Form, side: torch.Tensor) -> Iterator[ActivationSemantics]:
    name = define_custom(_by_encoding(side))
    for limit in _limits(subject) if subject.arity == 2 else (None,):
        yield ActivationSemantics(name, subject.arity == 2, limit, up_offset=form.offset)


def _by_encoding(side: torch.Tensor) -> torch.Tensor:
    # `all_encodings` counts from the most negative integer, a table from zero.
    low, high = side.flatten().chunk(2)
    return torch.cat([high, low])


def _limits(subject: _Subject) -> tuple[float | None, ...]:
    least, most = LIMITS
    return (None, *(n for n in _usable(subject.numbers, subject.dtype) if least <= n <= most))


def _usable(numbers: Iterable[float], dtype: torch.dtype) -> list[float]:
    largest = torch.finfo(dtype).max
    return sorted({n for n in numbers if math.isfinite(n) and abs(n) <= largest})


def _sample(values: Values) -> Values:
    """Few of many elements, `_SHAPE`: what is another activation shows it on them at once."""
    return tuple(value[:, ::8, ::16].contiguous() for value in values)


def _resembles(semantics: ActivationSemantics, probe: Values, side: torch.Tensor) -> bool:
    """Whether `semantics` makes `side` of a sample of the gate's probe."""
    expected = times_up(semantics, gate_side(semantics, probe[0]), probe[-1])
    return all_same_bytes(side, expected) or _is_flushed(semantics, probe, side)


def _is_flushed(semantics: ActivationSemantics, probe: Values, out: torch.Tensor) -> bool:
    """Whether `out` is `semantics`, with a zero for what lies below the normal numbers.

    On CPUs with bfloat16 instructions torch hands some activations to a library that flushes
    subnormals.  Only the gate's side is flushed: `up` may be large.
    """
    side = gate_side(semantics, probe[0])
    expected = times_up(semantics, side, probe[-1])
    small = side.float().abs() <= torch.finfo(side.dtype).tiny
    flushed = times_up(semantics, torch.where(small, side * 0, side), probe[-1])
    zeros = (out == 0) & (flushed == 0)
    return bool((same_bytes(out, expected) | same_bytes(out, flushed) | zeros).all())


# --- proof ---------------------------------------------------------------------------------------


def _is_known(subject: _Subject, order: tuple[int, ...], semantics: ActivationSemantics) -> bool:
    """Whether it is `semantics`, which torch need not give the same bytes everywhere.

    Where tensors are no whole number of vectors torch takes other code for some of them, with
    other roundings: there the values must be near.
    """
    values = tuple(v.flatten() for v in _gate_probe(subject, semantics.up_offset))
    ordered = (values[0], shuffled(values[0], 0))[: subject.arity]
    return (
        _equals(subject, order, semantics, _probes(subject, semantics), flushed=True)
        and _equals(subject, order, semantics, whole_vectors(ordered), flushed=True)
        and all(_is_near(subject, order, semantics, probe) for probe in anywhere(values))
    )


def _is_elementwise(
    subject: _Subject, order: tuple[int, ...], semantics: ActivationSemantics
) -> bool:
    """Whether it is `semantics` wherever an element lies."""
    values = tuple(shuffled(subject.encodings().flatten(), seed) for seed in (2, 3))
    return _equals(subject, order, semantics, anywhere(values[: subject.arity]))


def _equals(
    subject: _Subject,
    order: tuple[int, ...],
    semantics: ActivationSemantics,
    probes: Iterable[Values],
    *,
    flushed: bool = False,
) -> bool:
    """Whether it is `semantics` on all probes; `flushed` where subnormals may be zeros."""
    for probe in probes:
        out, expected = subject.run(order, probe), activate(semantics, *probe)
        if not (all_same_bytes(out, expected) or (flushed and _is_flushed(semantics, probe, out))):
            return False
    return True


def _is_near(
    subject: _Subject, order: tuple[int, ...], semantics: ActivationSemantics, probe: Values
) -> bool:
    out, expected = subject.run(order, probe), activate(semantics, *probe)
    if all_same_bytes(out, expected):
        return True
    near = torch.isclose(out.float(), expected.float(), 2 * torch.finfo(out.dtype).eps, _NEAR)
    # What overflows on the way does so in one order of the operations and not in another.
    return bool((near | ~expected.isfinite()).all())


def _probes(subject: _Subject, semantics: ActivationSemantics) -> Iterator[Values]:
    encodings = subject.encodings()
    partners = shuffled(encodings, 0)
    special = special_values(_usable(subject.numbers, subject.dtype), subject.dtype, subject.device)
    every = _in_turn(special, _SHAPE[-1] * _vectors(special.numel()))
    if subject.arity == 1:
        yield (encodings,)
        yield (partners,)
        yield (every,)
        return
    yield _gate_probe(subject, semantics.up_offset)
    yield torch.ones_like(encodings), encodings
    yield torch.full_like(encodings, _telling_gate(semantics, encodings)), encodings
    yield encodings, partners
    for offset in (0, 4):
        yield encodings, _in_turn(special.roll(-offset), encodings.numel()).view(_SHAPE)
    pairs = special.numel() ** 2
    size = _SHAPE[-1] * _vectors(pairs)
    yield _in_turn(special.repeat_interleave(special.numel()), size), _in_turn(special, size)


def _vectors(count: int) -> int:
    return math.ceil(count / _SHAPE[-1])


def _in_turn(values: torch.Tensor, size: int) -> torch.Tensor:
    return values[torch.arange(size, device=values.device) % values.numel()]


def _telling_gate(semantics: ActivationSemantics, encodings: torch.Tensor) -> float:
    """A gate whose side is near one, where a clamp of `up` shows."""
    side = gate_side(semantics, encodings)
    distance = torch.nan_to_num(side.double().abs().log2().abs(), nan=math.inf)
    return encodings.flatten()[distance.flatten().argmin()].item()
