"""Norms, with and without a residual, and all that is made of them, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...core.oracle import NormSemantics
from ...core.oracle.norm import name_inputs
from ...linear.outputs import Outputs, empty
from ...linear.rows import rows_of
from .launch import launch
from .sources import NormSource
from .tiles import emit


@triton.jit
def norm_kernel(
    source, targets, shrinks, partial, shape, OP: tl.constexpr, CODES: tl.constexpr,
    PLAN: tl.constexpr,
):  # fmt: skip
    """Of a `NormSource`: its new residual, and whatever `targets` and `shrinks` ask for."""
    emit(source, targets, shrinks, partial, shape, OP, True, CODES, PLAN)


def launch_norm(
    semantics: NormSemantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
) -> torch.Tensor | None:
    """Fill `outputs` with the norm of (x, [residual,] weight, [bias]).

    Args:
        semantics: what to compute.
        inputs: bfloat16; activations as `rows_of` reads them, the rest contiguous.
        outputs: where to.

    Returns:
        the new residual, contiguous, where one is added; else None.
    """
    x, residual, weight, bias = name_inputs(semantics, inputs)
    source = NormSource(x, rows_of(x).stride, weight, semantics.eps, bias)
    if residual is not None:
        source = source._replace(
            residual=residual,
            residual_stride=rows_of(residual).stride,
            added=empty(x.shape, x.dtype, x.device),
        )
    launch(norm_kernel, source, outputs, semantics.order, norm=True)
    return source.added
