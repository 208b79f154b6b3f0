"""Input ranges of a model that is only observed: nothing is fused, quantised or kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.platform import detect_platform
from ..fusion.record import record, row_layouts
from ..linear.branching import RowLayout
from ..linear.calibration import Calibration, Observer, choose_ranges, count_magnitudes
from ..linear.experts.layer import ExpertsLinear
from ..linear.kernels.float import FloatLinear
from ..linear.quantized_linear import QuantizedLinear
from ..linear.registry import LayerRegistry
from ..linear.routed import RoutedLinear
from ..linear.weights import find_linears, replace_module
from .experts import ModelExperts
from .inputs import example_inputs


@dataclass(frozen=True)
class Observed:
    """What linears, and projections of experts, saw.

    Attributes:
        ranges: the input range of each.
        saturated: share of the magnitudes, 0 to 1, outside of that range.
        read_weights: linears whose weight the model computes with itself.
    """

    ranges: Calibration
    saturated: Mapping[str, float]
    read_weights: frozenset[str]


def observe_inputs(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], observer: Observer
) -> Observed:
    """Run `batches` through a float model, as `wrap` does to calibrate.

    Args:
        model: just loaded; its linears are replaced for good, so drop it afterwards.
        batches: keyword arguments of one forward each.
        observer: chooses the range.

    Raises:
        CalibrationError: no batches, or an activation that is not finite.
        WrapError: the model cannot run.
    """
    registry = LayerRegistry()
    found, _ = find_linears(model)
    for index, (name, linear) in enumerate(found.items()):
        module = linear.module
        assert not isinstance(module, QuantizedLinear)
        weight = module.weight
        kernel = FloatLinear(module)
        layer = RoutedLinear(name, index, kernel, registry, weight.dtype, weight.device)
        for path in linear.paths:
            replace_module(model, path, layer)
        registry.add(layer)
        layer.weight_was_read = False
    experts = ModelExperts(model, registry, ExitStack(), None, {})
    experts.route(detect_platform(next(iter(registry)).device))
    inputs = example_inputs(model)
    with torch.no_grad():
        layouts = row_layouts(model, inputs, record(model, inputs))
    for layer in registry:
        ran = layer.experts_name if isinstance(layer, ExpertsLinear) else layer.name
        layer.row_layout = layouts.get(ran, RowLayout.UNKNOWN)
    read = frozenset(layer.name for layer in registry if layer.weight_was_read)
    histograms = count_magnitudes(model, registry, batches)
    saturated = {name: observer.saturated(seen) for name, seen in histograms.items()}
    return Observed(choose_ranges(registry, histograms, observer), saturated, read)
