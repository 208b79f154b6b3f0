"""Kernels for the projections of experts that are unquantised in the model."""

from __future__ import annotations

import torch
from torch import nn

from ..core.platform import Platform
from ..core.scheme import LinearScheme
from ..linear.calibration import Calibration
from ..linear.experts.find import stored_bias, stored_weight
from ..linear.experts.form import ExpertsForm
from ..linear.experts.kernels.base import GroupedKernel
from ..linear.experts.kernels.each import FloatExperts
from ..linear.experts.kernels.native_bf16 import NativeBf16Experts
from ..linear.experts.kernels.selection import build_grouped_kernel
from ..linear.experts.layer import ExpertsLinear
from ..linear.experts.weight import ExpertsWeight
from ..linear.kernels.build import calibrated_contract
from ..linear.kernels.float_selection import FloatKernel, select_float_kernel
from ..linear.kernels.native_bf16 import FloatLinearConfig, NativeBf16Linear


def float_experts(module: nn.Module, form: ExpertsForm, projection: str) -> FloatExperts:
    """A projection's own weights, multiplied by torch; nothing is copied."""
    weight: torch.Tensor = getattr(module, projection).detach()
    bias = getattr(module, f"{projection}_bias").detach() if form.has_bias else None
    interleaved = form.interleaved and projection == form.up_name
    return FloatExperts(weight.mT if form.transposed else weight, bias, interleaved=interleaved)


def unquantized_experts(
    layer: ExpertsLinear,
    module: nn.Module,
    form: ExpertsForm,
    platform: Platform,
    choice: FloatKernel,
    *,
    keeps_weight: bool,
) -> FloatExperts | NativeBf16Experts:
    """A kernel for a projection that stays unquantised.

    Args:
        layer: the projection.
        module: the model's own experts.
        form: how they compute.
        platform: facts about the device of the weights.
        choice: what was asked for.
        keeps_weight: another module has this weight too.

    Raises:
        KernelUnavailableError: the C kernels were asked for and cannot serve it (I14).
    """
    projection = layer.name.rpartition(".")[2]
    _, outputs, inputs = form.shape(projection)
    config = FloatLinearConfig(inputs, outputs, module.get_parameter(projection).dtype)
    # A linear and experts are served by the same C matmul, on the same conditions.
    chosen = select_float_kernel(config, platform, choice, layer.name)
    if chosen.kernel is NativeBf16Linear:
        return NativeBf16Experts.of(module, form, projection, keeps_weight=keeps_weight)
    kernel = float_experts(module, form, projection)
    kernel.rejected = chosen.rejected
    return kernel


def quantized_experts(
    layer: ExpertsLinear,
    form: ExpertsForm,
    scheme: LinearScheme,
    ranges: Calibration | None,
    platform: Platform,
    force: str | None,
) -> GroupedKernel:
    """A kernel for the unquantised weights that `layer` was made of; the layer keeps its own."""
    module, projection = layer.original, layer.name.rpartition(".")[2]
    assert module is not None
    weight = ExpertsWeight.from_float(
        stored_weight(module, form, projection), layer.name, scheme.weight
    )
    contract = calibrated_contract(scheme, layer.name, ranges, weight.device)
    bias = stored_bias(module, form, projection)
    return build_grouped_kernel(layer.name, weight, bias, contract, platform, force)
