"""What a user gets without producers: the pair in plain torch, fused by torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from branchline.core import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR, QuantKey
from branchline.core.oracle import ActivationSemantics, NormSemantics, Semantics

_MAX = torch.finfo(torch.float8_e4m3fn).max
_FLOOR = 1e-12
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def plain(semantics: Semantics, key: QuantKey, scale: float) -> Callable[..., torch.Tensor] | None:
    """The op and the quantiser of `key` in torch's own ops: from inputs to codes.

    Args:
        semantics: one that is written down here.
        key: static per tensor or dynamic per token; None is returned for others.
        scale: the static one.
    """
    quantiser = {FP8_STATIC_TENSOR: _static(scale), FP8_DYNAMIC_TOKEN: _by_token}.get(key)
    if quantiser is None:
        return None
    op = _op(semantics)
    return lambda *inputs: quantiser(op(*inputs))


def pair(semantics: Semantics, key: QuantKey, scale: float) -> Callable[..., torch.Tensor] | None:
    """`plain`, compiled: one graph, for one shape, which is the faster code."""
    function = plain(semantics, key, scale)
    if function is None:
        return None
    # All these functions share their code, by which recompilations are counted and limited.
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def _static(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    factor = 1 / scale
    return lambda raw: (raw.float() * factor).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)


def _by_token(raw: torch.Tensor) -> torch.Tensor:
    full = raw.float()
    scale = full.abs().amax(-1, keepdim=True).clamp(min=_FLOOR) / _MAX
    return (full / scale).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)


def _op(semantics: Semantics) -> Callable[..., torch.Tensor]:
    if isinstance(semantics, ActivationSemantics):
        function = _ACTIVATIONS[semantics.activation]
        return (lambda gate, up: function(gate) * up) if semantics.gated else function
    assert isinstance(semantics, NormSemantics)
    eps = semantics.eps
    if semantics.order == "llama":
        return lambda x, weight: weight * _rms(x, eps)
    assert semantics.order == "layer_norm"
    return lambda x, weight: F.layer_norm(x, weight.shape, weight, None, eps)


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    full = x.float()
    return (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
