"""How each scheme is written: names of tensors, and the config that readers know them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)

from ..core.quant_key import ScaleFormat
from ..core.scheme import LinearScheme
from ..linear.calibration import Calibration
from ..linear.quantized_weight import QuantizedWeight

COMPRESSED_TENSORS = "compressed-tensors"
#: compressed-tensors has no words for blocks with scales that are powers of two.
FINE_GRAINED = "fp8"

_TARGETS = ["Linear"]


def format_of(scheme: LinearScheme) -> str:
    """The format that `scheme` is written in: `COMPRESSED_TENSORS` or `FINE_GRAINED`."""
    weight = scheme.weight
    ue8m0_blocks = weight.rows > 1 and weight.scale_format == ScaleFormat.UE8M0
    return FINE_GRAINED if ue8m0_blocks else COMPRESSED_TENSORS


def stored_tensors(
    scheme: LinearScheme, weight: QuantizedWeight, layer: str, ranges: Calibration | None
) -> dict[str, torch.Tensor]:
    """The tensors of one linear, by the last part of their names.

    Args:
        scheme: of the linear.
        weight: its codes and scales.
        layer: its name in the model, by which `ranges` knows it.
        ranges: for a scheme whose inputs have a scale that is stored.

    Returns:
        codes as float8_e4m3fn (N, K), or uint8 (N, K / 2) with two e2m1 codes each; block scales
        float32, float8_e4m3fn or uint8 (e8m0); per-tensor scales float32 (1,), global ones as
        the number that values are divided by.

    Raises:
        CalibrationError: the range of this layer's input is not known.
    """
    if weight.global_scale is not None:
        tensors = {
            "weight_packed": weight.codes.view(torch.uint8),
            "weight_scale": weight.scale,
            "weight_global_scale": weight.global_scale.reciprocal(),
        }
        if ranges is not None:
            scale = torch.tensor([ranges.global_scale(layer)])
            tensors["input_global_scale"] = scale.reciprocal()
        return tensors
    if format_of(scheme) == FINE_GRAINED:
        return {"weight": weight.codes, "weight_scale_inv": weight.scale}
    one_byte = weight.scale.dtype == torch.float8_e8m0fnu
    scale = weight.scale.view(torch.uint8) if one_byte else weight.scale
    tensors = {"weight": weight.codes, "weight_scale": scale}
    if scheme.static and ranges is not None:
        tensors["input_scale"] = torch.tensor([ranges.input_scale(layer)])
    return tensors


def quantization_config(scheme: LinearScheme, unquantized: Sequence[str]) -> dict[str, Any]:
    """What config.json says of the quantisation.

    Args:
        scheme: of every linear that is not in `unquantized`.
        unquantized: names of linears that keep their weights.
    """
    if format_of(scheme) == FINE_GRAINED:
        return {
            "quant_method": FINE_GRAINED,
            "activation_scheme": "dynamic",
            "weight_block_size": [scheme.weight.rows, scheme.weight.columns],
            "scale_fmt": str(scheme.weight.scale_format),
            "modules_to_not_convert": list(unquantized),
        }
    made, stored_as = _compressed_tensors_scheme(scheme)
    made.format = stored_as
    config = QuantizationConfig(
        config_groups={"group_0": made},
        format=stored_as.value,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(unquantized),
    )
    return {"version": compressed_tensors.__version__, **config.model_dump(mode="json")}


def _compressed_tensors_scheme(
    scheme: LinearScheme,
) -> tuple[QuantizationScheme, CompressionFormat]:
    weight = scheme.weight
    if weight.global_scale:
        return _preset("NVFP4"), CompressionFormat.nvfp4_pack_quantized
    if weight.scale_format == ScaleFormat.UE8M0:
        return _preset("MXFP8"), CompressionFormat.mxfp8_quantized
    if weight.blockwise:
        return _preset("FP8_BLOCK"), CompressionFormat.float_quantized
    made = _preset("FP8_DYNAMIC")
    if scheme.input is None:
        made.input_activations = None
        return made, CompressionFormat.naive_quantized
    if scheme.static:
        made.input_activations = _preset("FP8").input_activations
    return made, CompressionFormat.float_quantized


def _preset(name: str) -> QuantizationScheme:
    return preset_name_to_scheme(name, list(_TARGETS))
