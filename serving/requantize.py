"""Another scheme for one linear of a served model."""

from __future__ import annotations

import torch

from ..core.errors import CalibrationError, ConfigError
from ..core.platform import detect_platform
from ..linear.calibration import Calibration
from ..linear.kernels.base import LinearKernel, QuantizedKernel
from ..linear.kernels.build import build_kernel, calibrated_contract
from ..linear.kernels.float import FloatLinear
from ..linear.quantized_weight import QuantizedWeight
from ..linear.routed import RoutedLinear
from ..linear.weights import LinearModule, float_weight
from .config import Quant


def requantized(
    layer: RoutedLinear, quant: Quant, ranges: Calibration | None, force: str | None
) -> LinearKernel:
    """The kernel of `layer` under another scheme; the layer keeps its own until it is set.

    Args:
        layer: whose weight it is: the model's own where that is unquantised, else its codes'
            values.
        quant: the scheme.
        ranges: observed inputs, for a scheme that needs them.
        force: name of the only kernel that may be chosen.

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
        return FloatLinear(original)
    if quant.calibrated and ranges is None:
        raise CalibrationError(
            f"quant='{quant}' for {layer.name}",
            "needs observed input ranges, and the model was wrapped without any",
            "choose a dynamic scheme, or wrap an unquantised model with quant='fp8-static'",
        )
    weight = QuantizedWeight.from_float(_values(layer), layer.name, scheme.weight)
    device = weight.codes.device
    contract = calibrated_contract(scheme, layer.name, ranges if quant.calibrated else None, device)
    return build_kernel(
        layer.name, weight, layer.kernel.bias(), contract, detect_platform(device), force
    )


def _values(layer: RoutedLinear) -> torch.Tensor:
    if isinstance(layer.original, LinearModule):
        return float_weight(layer.original)
    kernel = layer.kernel
    assert isinstance(kernel, QuantizedKernel)
    return kernel.quantized_weight().dequantize()
