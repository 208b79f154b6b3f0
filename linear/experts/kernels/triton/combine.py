"""The weighted sum of what a token's experts made of it, in one Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ....kernels.triton.plan import OPTIONS
from ....outputs import empty
from ...pairs import Pairs, check_combined

if TYPE_CHECKING:
    # Within a kernel a constant is what was passed, not the box that it came in.
    constexpr = Any
else:
    constexpr = tl.constexpr

_COLUMNS = 1024


@triton.jit
def combine_kernel(
    out, weights, position, expert, total, experts, columns, CHOICES: constexpr,
    PARTIAL: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """Some columns of one token.

    Args:
        out: (P, N), by position.
        weights: (T, k), by choice.
        position: int64 (P,), of each pair.
        expert: int32 (P,), at each position.
        total: float32 (T, N).
        experts: E.
        columns: N.
        CHOICES: k.
        PARTIAL: whether some pairs were computed by nobody.
        COLUMNS: of a program.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = column < columns
    summed = tl.full([COLUMNS], 0.0, tl.float32)
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        at = tl.load(position + pair)
        written = columns
        if PARTIAL:
            # Of what nobody computed, nothing.
            written = tl.where(tl.load(expert + at) < experts, columns, 0)
        read = out + at * columns + column
        value = tl.load(read, mask=column < written, other=0.0).to(tl.float32)
        summed += value * tl.load(weights + pair).to(tl.float32)
    tl.store(total + token * columns + column, summed, mask=live)


def combine(out: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """As `pairs.combine`, to the bit.

    Args:
        out: (P, N), by position.
        weights: (T, k), by choice.
        pairs: of the forward.

    Returns:
        float32 (T, N).

    Raises:
        ContractError: rows or weights that are not these pairs'.
    """
    check_combined(out, weights, pairs)
    columns = out.shape[1]
    total = empty((pairs.tokens, columns), torch.float32, out.device)
    if not pairs.tokens or not columns:
        return total
    kernel: Any = combine_kernel
    kernel[(pairs.tokens, triton.cdiv(columns, _COLUMNS))](
        out.contiguous(),
        weights.contiguous(),
        pairs.position,
        pairs.expert,
        total,
        pairs.experts,
        columns,
        CHOICES=pairs.top_k,
        PARTIAL=pairs.partial,
        COLUMNS=_COLUMNS,
        num_warps=4,
        **OPTIONS,
    )
    return total
