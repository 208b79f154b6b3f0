"""Activations as rows for kernels, and the checks that every call needs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .base import ACCEPTED, Verdict


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
        return Rows(x.numel() // columns if columns else 0, columns, columns)
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


def flattened(*activations: Rows) -> tuple[Rows, ...]:
    """The same elements as one long row each, where no activation has gaps between its rows."""
    if any(rows.stride != rows.columns for rows in activations):
        return activations
    return tuple(Rows(1, r.number * r.columns, r.number * r.columns) for r in activations)


def new_codes(x: torch.Tensor) -> torch.Tensor:
    """Room for the codes of `x`: contiguous, uninitialised."""
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)


def check_activations(kernels: str, activations: tuple[torch.Tensor, ...]) -> Verdict:
    """Whether these are bfloat16 rows of one shape on one device.

    Args:
        kernels: who asks, for the reason: "the C kernels".
        activations: one, or gate and up.
    """
    first = activations[0]
    for x in activations:
        if x.dtype != torch.bfloat16:
            return Verdict(False, f"{kernels} compute bfloat16, the activation is {name(x.dtype)}")
        if x.shape != first.shape:
            return Verdict(False, f"gate is {tuple(first.shape)}, up is {tuple(x.shape)}")
        if x.device != first.device:
            return Verdict(False, f"gate is on {first.device}, up is on {x.device}")
        if as_rows(x) is None:
            return Verdict(
                False,
                f"{kernels} read contiguous rows with one stride between them, the activation "
                f"is {tuple(x.shape)} with strides {x.stride()}",
            )
    return ACCEPTED


def check_weight(kernels: str, x: torch.Tensor, weight: torch.Tensor) -> Verdict:
    """Whether `weight` is the gain of a norm over the last dimension of `x`."""
    if weight.dtype != x.dtype:
        reason = f"the activation is {name(x.dtype)}, the norm weight is {name(weight.dtype)}"
        return Verdict(False, reason)
    if weight.shape != x.shape[-1:]:
        reason = f"the activation has {x.shape[-1]} columns, the norm weight is "
        return Verdict(False, reason + str(tuple(weight.shape)))
    if weight.device != x.device:
        reason = f"the activation is on {x.device}, the norm weight is on {weight.device}"
        return Verdict(False, reason)
    if not weight.is_contiguous():
        return Verdict(False, f"{kernels} read a contiguous norm weight, its stride is not 1")
    return ACCEPTED


def name(dtype: torch.dtype) -> str:
    """A dtype without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
