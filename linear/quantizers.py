"""How a linear quantises a plain activation itself: the oracle's bytes, by the fastest means."""

from __future__ import annotations

import torch

from ..core import native
from ..core.errors import ContractError
from ..core.oracle import quantize
from ..core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from ..core.quantized_activation import QuantizedActivation
from .contract import InputContract

_IDENTITY = 0


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
    scale = contract.static_scale(consumer) if key.static else None
    native_runs = (
        key in (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN)
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and native.load().available
    )
    if not native_runs:
        value = None if scale is None else scale.value
        return quantize(x, key, static_scale=value, producer=consumer)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    codes = torch.empty(rows.shape, dtype=key.code_dtype)
    if scale is not None:
        _static(rows, codes, scale.reciprocal)
        value = scale.value
    else:
        value = _token(rows, codes).view(*x.shape[:-1], 1)
    return QuantizedActivation(
        codes.view(x.shape), value, x.dtype, x.shape, key, producer=f"{consumer}'s own quantiser"
    )


def _static(rows: torch.Tensor, codes: torch.Tensor, reciprocal: float) -> None:
    native.load().call(
        "bl_act_static",
        _IDENTITY,
        rows.data_ptr(),
        rows.stride(0),
        None,
        0,
        codes.data_ptr(),
        codes.stride(0),
        *rows.shape,
        reciprocal,
        native.threads(),
    )


def _token(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    scale = torch.empty(rows.shape[0], dtype=torch.float32)
    native.load().call(
        "bl_quantize_token",
        rows.data_ptr(),
        rows.stride(0),
        codes.data_ptr(),
        codes.stride(0),
        scale.data_ptr(),
        *rows.shape,
        native.threads(),
    )
    return scale
