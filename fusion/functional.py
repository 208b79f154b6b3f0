"""The fused step as a function, for models written by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.errors import ContractError
from ..core.oracle import Semantics
from ..core.platform import detect_platform
from ..core.quantized_activation import QuantizedActivation
from ..core.route import Route
from ..linear.hooks import hook_names
from ..linear.routed import RoutedLinear
from .identify import identify_activation
from .producers.base import Emission, ProducerRequest
from .raw import compute_raw
from .registry import REGISTRY
from .trace import holds_tensors, settings

_proofs: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], Semantics | None]] = (
    weakref.WeakKeyDictionary()
)


def maybe_fused_act_quant(
    act_fn: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    linear: RoutedLinear,
) -> torch.Tensor | QuantizedActivation:
    """``act_fn(x)``, or ``act_fn(gate) * up``, for `linear`; quantised in one step where right.

    It is right where the linear takes FP8 codes, the model was not wrapped by policy "static" with
    room for adapters, nothing in the batch in flight reads the raw activation (I2), `act_fn` is
    proved to be an activation (I4; the proof is kept with the object), and a producer accepts the
    tensors.  Everywhere else the raw activation comes back: by the same definition where there is
    a proof, so that the linear gives the same bytes for either; otherwise, and where hooks sit on
    `act_fn`, or it has weights, or the linear takes no codes, by `act_fn` itself.

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
    semantics = _semantics(act_fn, inputs, linear)
    if semantics is not None:
        codes = _codes(semantics, inputs, linear)
        return compute_raw(semantics, *inputs) if codes is None else codes
    out = act_fn(inputs[0])
    return out * inputs[1] if len(inputs) == 2 else out


def _codes(
    semantics: Semantics, inputs: tuple[torch.Tensor, ...], linear: RoutedLinear
) -> QuantizedActivation | None:
    contract, rules = linear.kernel.contract, linear.rules
    if contract.key is None or linear.reads_raw():
        return None
    if rules.never_fused and linear.takes_branches:
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
    emission = Emission(contract, site=linear.name)
    if producer is None or not producer.accepts(semantics, inputs, emission).ok:
        return None
    return producer.produce(semantics, inputs, emission).activation


def _semantics(
    act_fn: Callable[[torch.Tensor], torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    linear: RoutedLinear,
) -> Semantics | None:
    """What the step computes, as proved; None where only `act_fn` itself can say."""
    gate = inputs[0]
    if linear.kernel.contract.key is None:
        return None
    if isinstance(act_fn, nn.Module) and (hook_names(act_fn) or holds_tensors(act_fn)):
        return None
    if any((other.shape, other.dtype) != (gate.shape, gate.dtype) for other in inputs):
        return None
    proofs = _proofs.setdefault(act_fn, {})
    # A proof holds for the settings it was made with: limits may be changed on the object.
    held = repr(sorted(getattr(act_fn, "__dict__", {}).items(), key=str))
    proof = (len(inputs), gate.dtype, gate.device, held)
    if proof not in proofs:
        proofs[proof] = _prove(act_fn, len(inputs), gate)
    return proofs[proof]


def _prove(
    act_fn: Callable[[torch.Tensor], torch.Tensor], arity: int, gate: torch.Tensor
) -> Semantics | None:
    def step(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        out = act_fn(gate)
        return out if up is None else out * up

    numbers = settings([act_fn]) if isinstance(act_fn, nn.Module) else ()
    finding, order = identify_activation(step, arity, gate.dtype, gate.device, numbers)
    return finding.semantics if order == tuple(range(arity)) else None
