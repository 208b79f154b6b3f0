"""From a quantised weight to the kernel that serves it best."""

from __future__ import annotations

import torch

from ...core.platform import Platform
from ...core.scheme import LinearScheme
from ..calibration import Calibration
from ..contract import InputContract, InputScale
from ..quantized_weight import QuantizedWeight
from .base import LinearConfig, QuantizedKernel
from .selection import select_kernel


def build_kernel(
    subject: str,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    contract: InputContract,
    platform: Platform,
    force: str | None = None,
) -> QuantizedKernel:
    """The first kernel that runs on `platform` and serves the layer `subject`.

    Args:
        subject: name of the layer.
        weight: its codes and scales.
        bias: (N,), or None.
        contract: the key of its input without layout (None: unquantised), and its scales.
        platform: facts about the device of `weight`.
        force: name of the only kernel that may be chosen.

    Raises:
        KernelUnavailableError: none runs, or the forced one is unknown or cannot (I14).
        ScaleError: a scale that the key needs is missing.
    """
    scheme = LinearScheme(weight.scheme, contract.key)
    config = LinearConfig(weight.in_features, weight.out_features, scheme)
    chosen = select_kernel(config, platform, force, subject)
    key = chosen.kernel.consumes(config)
    if key is None:
        taken = InputContract(None)
    else:
        taken = InputContract(key, contract.scale, contract.global_scale)
    kernel = chosen.kernel(weight, bias, taken)
    kernel.rejected = chosen.rejected
    return kernel


def calibrated_contract(
    scheme: LinearScheme, subject: str, ranges: Calibration | None, device: torch.device
) -> InputContract:
    """What a layer consumes that is quantised now, with the scales of its calibration.

    Args:
        scheme: of the layer.
        subject: its name.
        ranges: observed inputs, for a key whose scale is measured beforehand.
        device: where the scale is needed.

    Raises:
        CalibrationError: the layer was not observed, or saw nothing but zeros.
        ScaleError: a scale that cannot be used.
    """

    def checked(value: float) -> InputScale:
        return InputScale.checked(torch.tensor([value], device=device), subject, "calibration")

    key = scheme.input
    if ranges is None or key is None:
        return InputContract(key)
    if key.static:
        return InputContract(key, checked(ranges.input_scale(subject)))
    return InputContract(key, global_scale=checked(ranges.global_scale(subject)))
