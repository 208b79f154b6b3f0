"""From a linear's tensors, as a format stores them, to its weight and its input's contract."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...core.errors import CheckpointError, ScaleError
from ...core.quant_key import ScaleFormat
from ...core.scheme import WeightScheme
from ..contract import InputContract, InputScale
from ..quantized_weight import QuantizedWeight
from .layer import E8M0_CARRIERS, FP4_CARRIERS, Layer, wide

_RESTORE = "restore the checkpoint's files"
_MEND = "mend the checkpoint, or quantise the layer again"
_FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def assemble(
    layer: Layer, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
) -> tuple[QuantizedWeight, InputContract]:
    """Weight and contract; see `ResolvedQuant.assemble`.

    Raises:
        CheckpointError: as there.
        ScaleError: as there.
    """
    found = {role: _tensor(layer, role, names, tensors) for role, names in layer.roles().items()}
    scheme = layer.scheme.weight
    given = None
    if scheme.global_scale:
        given = _single(layer, "weight's global scale", found["weight's global scale"])
    weight = QuantizedWeight(
        _codes(layer, found["weight"], shape),
        _scale(layer, found["weight scale"], scheme.scale_shape(*shape)),
        scheme,
        shape[1],
        given,
    ).check(layer.name)
    return weight, _contract(layer, found.get("input scale"))


def _tensor(
    layer: Layer, role: str, names: tuple[str, ...], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    full = [f"{layer.name}.{part}" for part in names]
    there = [name for name in full if name in tensors]
    if len(there) != 1:
        what = "two names of one scale" if there else "which are missing"
        reason = f"its {role} is in {' or '.join(there or full)}, {what}"
        raise CheckpointError(layer.name, reason, _RESTORE)
    return tensors[there[0]]


def _codes(layer: Layer, codes: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    packed = layer.scheme.weight.global_scale
    served = FP4_CARRIERS if packed else (torch.float8_e4m3fn,)
    if codes.dtype not in served:
        reason = f"its weight is {codes.dtype}, {layer.scheme.weight} is {served[-1]}"
        raise CheckpointError(layer.name, reason, "convert the weights, or mend the metadata")
    wanted = (shape[0], -(-shape[1] // 2)) if packed else shape
    if tuple(codes.shape) != tuple(wanted):
        reason = f"its weight has shape {tuple(codes.shape)}, the model's takes {tuple(wanted)}"
        raise CheckpointError(layer.name, reason, "use the checkpoint of this model")
    return codes.view(torch.float4_e2m1fn_x2) if packed else codes


def _scale(layer: Layer, scale: torch.Tensor, wanted: tuple[int, int]) -> torch.Tensor:
    # [], [1] and [1, 1] are one shape, and so are [N] and [N, 1].
    if wide(scale.shape) == wide(wanted):
        scale = scale.reshape(wanted)
    return _carried(layer, scale, layer.scheme.weight)


def _carried(layer: Layer, scale: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """The scale in the dtype that carries its format."""
    ue8m0 = scheme.scale_format == ScaleFormat.UE8M0
    if scheme.scale_format == ScaleFormat.E4M3:
        if scale.dtype == torch.float8_e4m3fn:
            return scale
    elif ue8m0 and scale.dtype in E8M0_CARRIERS:
        return scale.view(torch.float8_e8m0fnu)
    elif scale.dtype in _FLOAT_SCALES:
        scale = scale.float()
        if ue8m0 and bool((torch.frexp(scale).mantissa.abs() != 0.5).any()):
            reason = "its weight scale holds numbers that are no powers of two (ue8m0)"
            raise ScaleError(layer.name, reason, "mend the metadata: scale_fmt")
        return scale
    reason = f"its weight scale is {scale.dtype}, which {scheme} does not take"
    raise ScaleError(layer.name, reason, _MEND)


def _single(layer: Layer, role: str, value: torch.Tensor) -> torch.Tensor:
    """A global scale as a float32 multiplier (1,)."""
    if value.numel() != 1 or value.dtype not in _FLOAT_SCALES:
        reason = f"its {role} is {value.dtype} of shape {tuple(value.shape)}, expected one number"
        raise ScaleError(layer.name, reason, _MEND)
    number = value.float().reshape(1)
    scale = number.reciprocal() if layer.stored.divisor else number
    if not bool((scale > 0) & scale.isfinite() & (number > 0) & number.isfinite()):
        reason = f"its {role} is {number.item()}, expected a positive finite number"
        raise ScaleError(layer.name, reason, _MEND)
    return scale


def _contract(layer: Layer, value: torch.Tensor | None) -> InputContract:
    key = layer.scheme.input
    if key is None or value is None or not layer.scheme.calibrated:
        return InputContract(key)
    if key.global_scale:
        scale = _single(layer, "input's global scale", value)
        return InputContract(key, global_scale=InputScale.checked(scale, layer.name, "checkpoint"))
    if value.dtype not in _FLOAT_SCALES:
        raise ScaleError(layer.name, f"its input scale is {value.dtype}, no float", _MEND)
    return InputContract(key, InputScale.checked(value, layer.name, "checkpoint"))
