"""What kernels read, and the raw activation that they make of it: rounded, as float32 tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .numerics import constexpr, load_bf16, load_encodings, reciprocal, relu, round_bf16, silu


class ActivationSource(NamedTuple):
    """Inputs of an activation; None for what it does not have.

    Attributes:
        gate: bfloat16, its only input if it is not gated.
        gate_stride: elements from one row to the next.
        up: bfloat16, what the activated gate is multiplied with.
        up_stride: as `gate_stride`.
        table: bfloat16 (65536,), the gate's side by encoding; its factor and limit are in there.
        multiplier: factor of the gate.
        gate_limit: largest gate.
        up_limit: largest magnitude of `up`.
        up_offset: added to `up`.
    """

    gate: Any
    gate_stride: int
    up: Any = None
    up_stride: int = 0
    table: Any = None
    multiplier: float | None = None
    gate_limit: float | None = None
    up_limit: float | None = None
    up_offset: float | None = None


class NormSource(NamedTuple):
    """Inputs of a norm, and the residual that it writes; None for what it does not have.

    Attributes:
        x: bfloat16.
        x_stride: elements from one row to the next.
        weight: bfloat16 (K,).
        eps: added to the mean of squares or to the variance.
        bias: bfloat16 (K,).
        residual: bfloat16, added to `x` before.
        residual_stride: as `x_stride`.
        added: bfloat16 (rows, K), contiguous: where the sum goes.
    """

    x: Any
    x_stride: int
    weight: Any
    eps: float
    bias: Any = None
    residual: Any = None
    residual_stride: int = 0
    added: Any = None


# --- activations ---------------------------------------------------------------------------------


@triton.jit
def _compute(source, gate, ACTIVATION: constexpr):
    if source.multiplier is not None:
        gate = round_bf16(gate * source.multiplier)
    if source.gate_limit is not None:
        gate = tl.minimum(gate, source.gate_limit, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "silu":
        out = round_bf16(silu(gate))
    elif ACTIVATION == "relu2":
        positive = relu(gate)
        out = round_bf16(positive * positive)
    elif ACTIVATION == "relu":
        out = relu(gate)
    else:
        tl.static_assert(ACTIVATION == "identity")
        out = gate
    return out


@triton.jit
def _read_gate(source, row, column, mask, ACTIVATION: constexpr):
    gate = source.gate + row * source.gate_stride + column
    if ACTIVATION == "table":
        out = load_bf16(source.table + load_encodings(gate, mask), mask)
    else:
        out = _compute(source, load_bf16(gate, mask), ACTIVATION)
    return out


@triton.jit
def read_activation(source, row, column, mask, ACTIVATION: constexpr):
    """The raw activation at (`row`, `column`); "table" looks the gate's side up."""
    if source.up is None:
        out = _read_gate(source, row, column, mask, ACTIVATION)
    else:
        # Before anything is computed, so that both inputs are on their way.
        up = load_bf16(source.up + row * source.up_stride + column, mask)
        out = _read_gate(source, row, column, mask, ACTIVATION)
        if source.up_limit is not None:
            limit = source.up_limit
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        if source.up_offset is not None:
            up = round_bf16(up + source.up_offset)
        out = round_bf16(out * up)
    return out


# --- norms ---------------------------------------------------------------------------------------


@triton.jit
def read_norm(source, row, column, mask):
    """What is normed, at (`row`, `column`); 0 where masked."""
    x = load_bf16(source.x + row * source.x_stride + column, mask)
    if source.residual is not None:
        residual = load_bf16(source.residual + row * source.residual_stride + column, mask)
        x = round_bf16(x + residual)
    return x


# The order of a float64 sum does not show in float32: any block size gives a row the same bytes.


@triton.jit
def sum_rows(x):
    """Sums over the columns in float64: (ROWS, 1)."""
    return tl.sum(x.to(tl.float64), axis=1, keep_dims=True)


@triton.jit
def sum_squares(x):
    """Sums of squares that are float32: exact for a bfloat16, but for over- and underflow."""
    return sum_rows(x * x)


@triton.jit
def sum_spread(x, mean, mask):
    """Sums of squared distances from the float64 `mean`."""
    distance = tl.where(mask, x.to(tl.float64) - mean, 0.0)
    return tl.sum(distance * distance, axis=1, keep_dims=True)


@triton.jit
def mean_of(total, columns):
    """A float64 sum over the columns as their float64 mean."""
    return total / tl.full([1, 1], columns, tl.float64)


@triton.jit
def inverse_rms(squares, columns, eps):
    """Of sums of squares: float32."""
    mean = tl.div_rn(squares.to(tl.float32), tl.full(squares.shape, columns, tl.float32))
    return reciprocal(tl.sqrt_rn(mean + eps))


@triton.jit
def inverse_deviation(spread, columns, eps):
    """Of sums of squared distances: float32."""
    return reciprocal(tl.sqrt_rn(mean_of(spread, columns).to(tl.float32) + eps))


@triton.jit
def finish_norm(source, x, mean, inverse, column, inside, ORDER: constexpr):
    """The raw activation of `x`, with the mean and the inverse of its row.

    `inside` masks columns; they and weights are (1, BLOCK).
    """
    weight = load_bf16(source.weight + column, inside)
    if ORDER == "llama":
        out = weight * round_bf16(x * inverse)
    elif ORDER == "gemma":
        out = x * inverse * (1.0 + weight)
    else:
        if ORDER == "layer_norm_1p":
            weight = round_bf16(weight + 1.0)
        else:
            tl.static_assert(ORDER == "layer_norm")
        out = (x - mean) * inverse * weight
        if source.bias is not None:
            out += load_bf16(source.bias + column, inside)
    return round_bf16(out)
