"""How a linear quantises a plain activation itself: the oracle's bytes, by the fastest means."""

from __future__ import annotations

import torch

from ..core.errors import ContractError
from ..core.oracle import ActivationSemantics, quantize
from ..core.quantized_activation import QuantizedActivation
from . import native
from .contract import InputContract
from .outputs import new_outputs

_IDENTITY = ActivationSemantics("identity", gated=False)


def quantize_input(x: torch.Tensor, contract: InputContract, consumer: str) -> QuantizedActivation:
    """Quantise `x` (..., K) for `contract`, whose key is not None.

    Args:
        x: the raw activation.
        contract: key and static scale of the consumer.
        consumer: its name, for messages.

    Raises:
        ContractError: there is no key.
        ScaleError: a static key without a usable scale.
    """
    key = contract.key
    if key is None:
        raise ContractError(
            consumer, "takes only raw activations", "hand it the activation as it is"
        )
    title = f"{consumer}'s own quantiser"
    if native.computes(x):
        outputs = new_outputs(x, contract, consumer)
        native.activation(_IDENTITY, (x,), outputs)
        return outputs.activation(title)
    static = contract.static_scale(consumer).value if key.static else None
    given = contract.required_global_scale(consumer).value if key.global_scale else None
    return quantize(x, key, static_scale=static, global_scale=given, producer=title)
