"""The fused step as a function, for models written by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.errors import ContractError
from ..core.oracle import ActivationSemantics, Semantics
from ..core.platform import detect_platform
from ..core.quantized_activation import QuantizedActivation
from ..core.route import Route
from ..linear.hooks import hook_names
from ..linear.routed import RoutedLinear
from .identify import Finding, identify_activation
from .producers.base import Emission, ProducerRequest
from .registry import REGISTRY

_findings: weakref.WeakKeyDictionary[Any, dict[tuple[torch.dtype, str], Finding]] = (
    weakref.WeakKeyDictionary()
)


def maybe_fused_act_quant(
    act_fn: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    linear: RoutedLinear,
) -> torch.Tensor | QuantizedActivation:
    """``act_fn(x)``, or ``act_fn(gate) * up``, for `linear`; quantised in one step where right.

    It is right where the linear takes static FP8 codes, the model was not wrapped by policy
    "static" with room for adapters, nothing in the batch in flight reads the
    raw activation (I2), `act_fn` is proved equal to a known activation (I4; the proof is kept with
    the object), and a producer accepts the tensors.  Everywhere else the raw activation comes
    back, computed by `act_fn` itself; the linear gives the same bytes for either.

    Args:
        act_fn: a unary activation, as a module or function.
        x: (..., K), or the pair (gate, up).
        linear: the consumer, (..., K) to (..., N).

    Raises:
        ContractError: more than two tensors.
    """
    inputs = x if isinstance(x, tuple) else (x,)
    if len(inputs) > 2:
        raise ContractError(
            "maybe_fused_act_quant", f"was handed {len(inputs)} tensors", "pass x, or (gate, up)"
        )
    codes = _codes(act_fn, inputs, linear)
    if codes is not None:
        return codes
    out = act_fn(inputs[0])
    return out * inputs[1] if len(inputs) == 2 else out


def _codes(
    act_fn: Callable[[torch.Tensor], torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    linear: RoutedLinear,
) -> QuantizedActivation | None:
    contract, rules = linear.kernel.contract, linear.rules
    if contract.key is None or contract.scale is None or linear.reads_raw():
        return None
    if rules.never_fused and linear.takes_branches:
        return None
    if isinstance(act_fn, nn.Module) and hook_names(act_fn):
        return None
    semantics = _semantics(act_fn, inputs)
    if semantics is None:
        return None
    request = ProducerRequest(
        semantics,
        contract.key,
        Route.FUSED,
        inputs[0].dtype,
        inputs[0].shape[-1],
        detect_platform(inputs[0].device),
    )
    producer = REGISTRY.select(request, rules.producer).producer
    if producer is None or not producer.accepts(inputs).ok:
        return None
    return producer.produce(semantics, inputs, Emission(contract, site=linear.name))


def _semantics(
    act_fn: Callable[[torch.Tensor], torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> Semantics | None:
    gated, dtype = len(inputs) == 2, inputs[0].dtype
    proofs = _findings.setdefault(act_fn, {})
    # A proof holds for the settings it was made with: limits may be changed on the object.
    proof = (dtype, repr(sorted(getattr(act_fn, "__dict__", {}).items(), key=str)))
    if proof not in proofs:
        proofs[proof] = identify_activation(act_fn, 1, dtype, inputs[0].device)[0]
    unary = proofs[proof].semantics
    if not isinstance(unary, ActivationSemantics):
        return None
    return ActivationSemantics(unary.activation, gated)
