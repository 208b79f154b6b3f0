"""Activations as rows for kernels, and the checks that every call needs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.selection import ACCEPTED, Verdict


class Rows(NamedTuple):
    """A (..., K) tensor as rows: `number` times `columns` neighbours, `stride` elements apart."""

    number: int
    columns: int
    stride: int


def as_rows(x: torch.Tensor) -> Rows | None:
    """How to walk over `x` row by row without copying it; None where one stride cannot do it."""
    if x.dim() == 0:
        return None
    columns = x.shape[-1]
    if x.is_contiguous():
        # A division is quicker than a product over the shape, and there is a call for every op.
        number = x.numel() // columns if columns else x.shape[:-1].numel()
        return Rows(number, columns, columns)
    if columns > 1 and x.stride(-1) != 1:
        return None
    number, stride = 1, columns
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if number == 1:
            stride = step
        elif step != stride * number:
            return None
        number *= size
    return Rows(number, columns, stride)


def rows_of(x: torch.Tensor) -> Rows:
    """The rows of a tensor that `check_activations` passed."""
    rows = as_rows(x)
    assert rows is not None, "produce() without accepts()"
    return rows


def check_activations(kernels: str, activations: dict[str, torch.Tensor]) -> Verdict:
    """Whether these are bfloat16 rows of one shape on one device.

    Args:
        kernels: who asks, for the reason: "the C kernels".
        activations: by what they are: {"gate": ..., "up": ...}.
    """
    (main, first), *_ = activations.items()
    for what, x in activations.items():
        if x.dtype != torch.bfloat16:
            return Verdict(False, f"{kernels} compute bfloat16, the activation is {name(x.dtype)}")
        if x.shape != first.shape:
            return Verdict(False, f"{main} is {tuple(first.shape)}, {what} is {tuple(x.shape)}")
        if x.device != first.device:
            return Verdict(False, f"{main} is on {first.device}, {what} is on {x.device}")
        if as_rows(x) is None:
            return Verdict(
                False,
                f"{kernels} read contiguous rows with one stride between them, the activation "
                f"is {tuple(x.shape)} with strides {x.stride()}",
            )
    return ACCEPTED


def check_vector(kernels: str, what: str, x: torch.Tensor, vector: torch.Tensor) -> Verdict:
    """Whether `vector`, the weight or bias of a norm (`what`), goes with the columns of `x`."""
    if vector.dtype != x.dtype:
        reason = f"the activation is {name(x.dtype)}, the norm {what} is {name(vector.dtype)}"
        return Verdict(False, reason)
    if vector.shape != x.shape[-1:]:
        reason = f"the activation has {x.shape[-1]} columns, the norm {what} is "
        return Verdict(False, reason + str(tuple(vector.shape)))
    if vector.device != x.device:
        reason = f"the activation is on {x.device}, the norm {what} is on {vector.device}"
        return Verdict(False, reason)
    if not vector.is_contiguous():
        return Verdict(False, f"{kernels} read a contiguous norm {what}, its stride is not 1")
    return ACCEPTED


def name(dtype: torch.dtype) -> str:
    """A dtype without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
