"""Tensors bit for bit, and the first place where they differ, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...core.oracle import ActivationSemantics, NormSemantics
from ...core.oracle.norm import name_inputs
from .cases import Case

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: What a buffer holds before a kernel writes it: NaN in every float format that has one.
UNWRITTEN = 0xFF


class Found(NamedTuple):
    """The outcome of one comparison.

    Attributes:
        elements: compared.
        differences: how many of them differ.
        place: index of the first; () where tensors differ as a whole.
        got: the first, as text.
        wanted: what it should have been.
    """

    elements: int
    differences: int = 0
    place: tuple[int, ...] = ()
    got: str = ""
    wanted: str = ""


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` as integers of its element size; any layout."""
    return x.view(_INTEGERS[x.element_size()])


def fill_unwritten(x: torch.Tensor) -> None:
    """Set every byte to `UNWRITTEN`."""
    # 0xFF in every byte is -1 in two's complement.
    bits(x).fill_(UNWRITTEN if x.element_size() == 1 else -1)


def same_bits(got: torch.Tensor, wanted: torch.Tensor, *, any_nan: bool = False) -> Found:
    """Element by element, by their bits.

    Args:
        got: what a producer made.
        wanted: what the oracle makes.
        any_nan: a NaN equals any other; else their bits count too.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return Found(1, 1, (), _kind(got), _kind(wanted))
    mine, theirs = bits(got), bits(wanted)
    if torch.equal(mine, theirs):
        return Found(wanted.numel())
    differs = mine != theirs
    if any_nan:
        differs &= ~(got.isnan() & wanted.isnan())
    return _first(differs, got, wanted)


def untouched(buffer: torch.Tensor, rows: torch.Tensor) -> Found:
    """Whether the `rows` (bool (M,)) of a buffer (M, K) are as `fill_unwritten` left them."""
    wanted = torch.empty_like(buffer)
    fill_unwritten(wanted)
    differs = (bits(buffer) != bits(wanted)) & rows[:, None]
    return _first(differs, buffer, wanted, buffer.numel())


def within_rounding(
    got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int
) -> Found:
    """Whether float32 sums of `terms` products are as near to the exact ones as rounding lets them.

    Args:
        got: float32 (M, width).
        exact: the sums in float64.
        magnitude: the sums of the products' magnitudes, in float64.
        terms: products in a sum.

    Rounding errors of n additions add up like a random walk, to the square root of n and not to n:
    a bound that every order of additions keeps, and that a lost product breaks.  Sums that float32
    cannot hold are not judged.
    """
    bound = 2.0**-24 * (8 + terms**0.5) * magnitude + terms * 2.0**-149
    judged = magnitude < torch.finfo(torch.float32).max / 2
    differs = judged & ~((got.double() - exact).abs() <= bound)
    return _first(differs, got, exact.float())


def within_sums(
    got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int
) -> Found:
    """As `within_rounding`, of sums of scaled products that were rounded to bfloat16 once more.

    Args:
        got: bfloat16 (..., N).
        exact: in float64.
        magnitude: the sums of the products' magnitudes, in float64.
        terms: products in a sum.

    Tensor cores add FP8 products with 14 bits or so, 128 columns at a time.
    """
    if got.shape != exact.shape or got.dtype != torch.bfloat16:
        return Found(1, 1, (), _kind(got), _kind(exact))
    unit = 2.0**-11 if got.is_cuda else 2.0**-24 * (8 + terms**0.5)
    bound = 2.0**-8 * 1.01 * exact.abs() + unit * magnitude + terms * 2.0**-133
    differs = ~((got.double() - exact).abs() <= bound)
    return _first(differs, got, exact.float())


def _first(
    differs: torch.Tensor, got: torch.Tensor, wanted: torch.Tensor, elements: int | None = None
) -> Found:
    elements = differs.numel() if elements is None else elements
    if not differs.any():
        return Found(elements)
    index = tuple(differs.nonzero()[0].tolist())
    return Found(
        elements, int(differs.sum()), index, element_text(got, index), element_text(wanted, index)
    )


def _kind(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def element_text(x: torch.Tensor, index: tuple[int, ...]) -> str:
    """One element with its bits: "0.5 (0x3F00)"; "0x7E" for one of a byte."""
    size = x.element_size()
    pattern = f"0x{int(bits(x)[index]) & (256**size - 1):0{2 * size}X}"
    return pattern if size == 1 else f"{x[index].item():g} ({pattern})"


# --- which input an element comes from ---------------------------------------------------------


def input_text(case: Case, what: str, index: tuple[int, ...], shape: torch.Size, per: int) -> str:
    """The inputs behind one element of an output.

    Args:
        case: the call's.
        what: "codes", "scale", "raw", ...
        index: of the element in the output.
        shape: of the output.
        per: elements of the activation behind one of codes, or of raw and residual.
    """
    if not index:
        return "the whole call" if what == "error" else "the whole output"
    x = case.inputs[0]
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    if what in ("scale", "shrunk"):
        return f"a {'scale' if what == 'scale' else 'product'} of a whole row or group"
    row = 0
    for place, size in zip(index[:-1], shape[:-1], strict=True):
        row = row * size + place
    column = index[-1] * per
    if row >= rows or column >= columns:
        return "padding"
    return ", ".join(
        f"{name}={element_text(tensor, (at(row, column)))}"
        for name, tensor, at in _named_inputs(case)
    )


def _named_inputs(
    case: Case,
) -> list[tuple[str, torch.Tensor, Callable[[int, int], tuple[int, ...]]]]:
    if isinstance(case.semantics, ActivationSemantics):
        named = dict(zip(("gate", "up"), case.inputs, strict=False))
    else:
        assert isinstance(case.semantics, NormSemantics)
        given = name_inputs(case.semantics, case.inputs)._asdict()
        named = {name: x for name, x in given.items() if x is not None}
    return [
        (
            name,
            x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x,
            (lambda row, column: (row, column)) if x.dim() > 1 else (lambda _, column: (column,)),
        )
        for name, x in named.items()
    ]
