"""Another scheme for one linear of a served model."""

from __future__ import annotations

import torch

from ..core.errors import CalibrationError, ConfigError
from ..core.platform import detect_platform
from ..linear.calibration import Calibration
from ..linear.kernels.base import LinearKernel, QuantizedKernel
from ..linear.kernels.build import build_kernel, calibrated_contract
from ..linear.kernels.float_selection import FloatKernel, build_float_kernel, give_weight_back
from ..linear.kernels.native_bf16 import NativeBf16Linear
from ..linear.quantized_weight import QuantizedWeight
from ..linear.routed import RoutedLinear
from ..linear.weights import LinearModule, float_weight
from .config import Quant


def requantized(
    layer: RoutedLinear,
    quant: Quant,
    ranges: Calibration | None,
    force: str | None,
    float_kernel: FloatKernel,
) -> LinearKernel:
    """The kernel of `layer` under another scheme; the layer keeps its own until it is set.

    Args:
        layer: whose weight it is: the model's own where that is unquantised, else its codes'
            values.
        quant: the scheme.
        ranges: observed inputs, for a scheme that needs them.
        force: name of the only kernel of quantised weights that may be chosen.
        float_kernel: what multiplies where nothing is quantised.

    Raises:
        ConfigError: "none" for a layer whose checkpoint holds codes.
        CalibrationError: the scheme needs ranges that are not there.
        KernelUnavailableError: no kernel serves it.
    """
    original = layer.original
    scheme = quant.scheme
    if scheme is None:
        if not isinstance(original, LinearModule):
            raise ConfigError(
                f"quant='none' for {layer.name}",
                "its checkpoint holds codes, and no unquantised weight",
                "name a scheme, or load an unquantised checkpoint",
            )
        if isinstance(layer.kernel, NativeBf16Linear):
            return layer.kernel
        # The weight stayed with the module while codes were multiplied; others may have it too.
        return build_float_kernel(
            layer.name,
            original,
            detect_platform(layer.device),
            float_kernel,
            weight_read=layer.weight_was_read,
            keeps_weight=True,
        )
    if quant.calibrated and ranges is None:
        raise CalibrationError(
            f"quant='{quant}' for {layer.name}",
            "needs observed input ranges, and the model was wrapped without any",
            "choose a dynamic scheme, or wrap an unquantised model with quant='fp8-static'",
        )
    weight = QuantizedWeight.from_float(_values(layer), layer.name, scheme.weight)
    device = weight.codes.device
    contract = calibrated_contract(scheme, layer.name, ranges if quant.calibrated else None, device)
    kernel = build_kernel(
        layer.name, weight, layer.kernel.bias(), contract, detect_platform(device), force
    )
    give_weight_back(layer.kernel)
    return kernel


def _values(layer: RoutedLinear) -> torch.Tensor:
    kernel = layer.kernel
    if isinstance(kernel, NativeBf16Linear):
        return kernel.unpacked()
    if isinstance(layer.original, LinearModule):
        return float_weight(layer.original)
    assert isinstance(kernel, QuantizedKernel)
    return kernel.quantized_weight().dequantize()
