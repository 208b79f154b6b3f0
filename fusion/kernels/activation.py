"""Activations, plain and gated, and all that is made of them, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...core.oracle import ActivationSemantics
from ...core.oracle.activation import unary_table
from ...linear.outputs import Outputs
from ...linear.rows import rows_of
from .launch import launch
from .sources import ActivationSource
from .tiles import emit


@triton.jit
def activation_kernel(
    source, targets, shrinks, partial, shape, OP: tl.constexpr, CODES: tl.constexpr,
    PLAN: tl.constexpr,
):  # fmt: skip
    """Of an `ActivationSource`: whatever `targets` and `shrinks` ask for."""
    emit(source, targets, shrinks, partial, shape, OP, False, CODES, PLAN)


def launch_activation(
    semantics: ActivationSemantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
) -> None:
    """Fill `outputs` with what `semantics` makes of (x,) or (gate, up).

    Args:
        semantics: what to compute.
        inputs: bfloat16, of one shape, rows as `rows_of` reads them.
        outputs: where to.
    """
    gate = inputs[0]
    source = ActivationSource(gate, rows_of(gate).stride)
    limit = semantics.limit
    if limit is not None:
        limit = torch.tensor(limit, dtype=gate.dtype).item()
    if semantics.tabled:
        source = source._replace(table=unary_table(semantics, gate.dtype, gate.device))
    else:
        source = source._replace(multiplier=semantics.multiplier, gate_limit=limit)
    if semantics.gated:
        up = inputs[1]
        source = source._replace(
            up=up,
            up_stride=rows_of(up).stride,
            up_limit=limit,
            up_offset=semantics.up_offset,
        )
    op = "table" if semantics.tabled else semantics.activation
    launch(activation_kernel, source, outputs, op, norm=False)
