"""The raw output of a norm, in the same summation order as its fused producers."""

from __future__ import annotations

import torch

from ..core import native
from ..core.oracle import NormSemantics, rms_norm

_ORDERS = {"llama": 0, "gemma": 1}


def norm_raw(semantics: NormSemantics, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm of `x` (..., K) with `weight` (K,): the oracle's bytes, by the fastest means.

    A site computes its norm by this function in the unfused route, not by the model's own module:
    the sum of squares has then one definition in every route, and all routes give the same bytes.
    """
    runs = (
        x.dtype == weight.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and weight.is_contiguous()
        and native.load().available
    )
    if not runs:
        return rms_norm(semantics, x, weight)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype)
    native.load().call(
        "bl_rms_norm_static",
        _ORDERS[semantics.order],
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        None,
        0,
        out.data_ptr(),
        out.stride(0),
        *rows.shape,
        semantics.eps,
        1.0,
        native.threads(),
    )
    return out.view(x.shape)
