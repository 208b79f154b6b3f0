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
from ..linear.experts.kernels.selection import build_grouped_kernel
from ..linear.experts.layer import ExpertsLinear
from ..linear.experts.weight import ExpertsWeight
from ..linear.kernels.build import calibrated_contract


def float_experts(module: nn.Module, form: ExpertsForm, projection: str) -> FloatExperts:
    """A projection's own weights, multiplied by torch; nothing is copied."""
    weight: torch.Tensor = getattr(module, projection).detach()
    bias = getattr(module, f"{projection}_bias").detach() if form.has_bias else None
    interleaved = form.interleaved and projection == form.up_name
    return FloatExperts(weight.mT if form.transposed else weight, bias, interleaved=interleaved)


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
