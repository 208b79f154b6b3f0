"""`wrap` without weights: the same steps, kernels chosen alike, nothing that could serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...core.platform import Platform
from ...core.quant_key import QuantKey
from ...core.scheme import LinearScheme
from ...linear.calibration import Calibration
from ...linear.checkpoint import ResolvedQuant
from ...linear.checkpoint.experts import halves_scheme
from ...linear.contract import InputContract, InputScale
from ...linear.experts.form import ExpertsForm
from ...linear.experts.kernels.base import GroupedKernel
from ...linear.experts.kernels.selection import build_grouped_kernel
from ...linear.experts.weight import ExpertsWeight
from ...linear.kernels.base import LinearKernel
from ...linear.kernels.build import build_kernel
from ...linear.kernels.float_selection import build_float_kernel
from ...linear.quantized_weight import QuantizedWeight
from ...linear.weights import AnyLinear, FoundLinear, LinearModule, linear_shape
from ..config import WrapConfig
from ..experts import ModelExperts
from ..inputs import Prompts
from ..stored_experts import StoredExperts
from ..stored_model import StoredModel
from ..wrap import Wrapping
from .kernels import StandInExperts, StandInLinear

#: Of a calibration that nobody ran: sites whose linears take one tensor get one scale.
_UNCALIBRATED = 1.0


class HollowWrapping(Wrapping):
    """One run of `wrap` over a model without weights.

    Args:
        model: of `hollow_model`.
        config: how it would be wrapped.
        undo: takes everything back.
        stored: what is quantised in its checkpoint; None where nothing is.
        platform: of the device that it would be served on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: WrapConfig,
        undo: ExitStack,
        stored: StoredModel | None,
        platform: Platform,
    ) -> None:
        self.stored = stored
        self.named = platform
        super().__init__(model, config, undo)
        if stored is not None:
            self.quantized = len(stored.linears) + len(stored.experts)

    def _platform(self, device: torch.device) -> Platform:
        return self.named

    def _first_kernel(self, name: str, module: AnyLinear) -> LinearKernel:
        out_features, in_features = linear_shape(module)
        return StandInLinear(in_features, out_features)

    def find_experts(self) -> HollowExperts:
        return HollowExperts(self)

    def _ranges(
        self, calibration: Prompts | Calibration | str | Path | None, tokenizer: Any
    ) -> Calibration | None:
        return None

    def _quantize(
        self,
        originals: dict[str, FoundLinear],
        skipped: set[str],
        ranges: Calibration | None,
    ) -> None:
        schemes = self._schemes(originals, skipped)
        for name, scheme in schemes.items():
            out_features, in_features = linear_shape(originals[name].module)
            weight = QuantizedWeight.unfilled(scheme.weight, out_features, in_features)
            self.registry.layers[name].kernel = build_kernel(
                name, weight, None, contract_of(scheme), self.named, self.config.linear_kernel
            )
        scheme = self.config.quant.scheme
        if self.stored is not None or scheme is None:
            assert isinstance(self.experts, HollowExperts)
            self.experts.choose_float()
        else:
            self.experts.quantize(scheme, skipped, None, self.named)

    def _schemes(
        self, originals: Mapping[str, FoundLinear], skipped: set[str]
    ) -> dict[str, LinearScheme]:
        if self.stored is not None:
            resolved = self.stored.resolved.schemes
            return {name: resolved[stored] for name, stored in self.stored.linears.items()}
        scheme = self.config.quant.scheme
        if scheme is None:
            return {}
        skipped = skipped | self._whose_weight_is_read()
        return {name: scheme for name in originals if name not in skipped}

    def _choose_float_kernels(self, originals: dict[str, FoundLinear]) -> None:
        tied = {entry.name for entry in self.ties}
        for name, found in originals.items():
            layer, module = self.registry.layers[name], found.module
            if isinstance(layer.kernel, StandInLinear):
                assert isinstance(module, LinearModule)
                layer.kernel = build_float_kernel(
                    name,
                    _unfilled(module),
                    self.named,
                    self.config.float_kernel,
                    weight_read=layer.weight_was_read,
                    keeps_weight=name in tied,
                )
        self.experts.choose_float_kernels(self.config.float_kernel, self.named)


class HollowExperts(ModelExperts):
    """Experts of a model without weights.

    Args:
        wrapping: the run that they are part of.
    """

    def __init__(self, wrapping: HollowWrapping) -> None:
        self._stored = {} if wrapping.stored is None else wrapping.stored.experts
        self._resolved = None if wrapping.stored is None else wrapping.stored.resolved
        self._named = wrapping.named
        super().__init__(
            wrapping.model,
            wrapping.registry,
            wrapping.undo,
            wrapping.config.linear_kernel,
            wrapping.split.experts,
        )

    def _first_kernel(
        self, module: nn.Module, form: ExpertsForm, projection: str, platform: Platform
    ) -> GroupedKernel:
        experts, out_features, in_features = form.shape(projection)
        return StandInExperts(experts, in_features, out_features)

    def choose_float(self) -> None:
        """The kernels of experts that are quantised in the checkpoint, or not at all."""
        for routed in self._routed:
            stored = self._stored.get(routed.name)
            for layer in (routed.up, routed.down):
                projection = layer.name.rpartition(".")[2]
                if stored is None:
                    layer.kernel = super()._first_kernel(
                        routed.original, routed.form, projection, self._named
                    )
                else:
                    assert self._resolved is not None
                    scheme = stored_scheme(stored, projection, self._resolved)
                    layer.kernel = self._kernel(layer.name, routed.form, projection, scheme)

    def quantize(
        self,
        scheme: LinearScheme,
        skipped: Iterable[str],
        ranges: Calibration | None,
        platform: Platform,
    ) -> None:
        left = set(skipped)
        self.choose_float()
        for routed in self._routed:
            for layer in (routed.up, routed.down):
                if layer.name not in left:
                    projection = layer.name.rpartition(".")[2]
                    layer.kernel = self._kernel(layer.name, routed.form, projection, scheme)

    def _kernel(
        self, name: str, form: ExpertsForm, projection: str, scheme: LinearScheme
    ) -> GroupedKernel:
        experts, out_features, in_features = form.shape(projection)
        one = QuantizedWeight.unfilled(scheme.weight, out_features, in_features)
        weight = ExpertsWeight((one,) * experts)
        contract = contract_of(scheme)
        return build_grouped_kernel(name, weight, None, contract, self._named, self._force)


def contract_of(scheme: LinearScheme) -> InputContract:
    """What a linear of `scheme` consumes, with scales that nobody measured."""
    key: QuantKey | None = scheme.input
    scale = InputScale(torch.tensor([_UNCALIBRATED]), "calibration")
    if key is not None and key.static:
        return InputContract(key, scale)
    return InputContract(key, global_scale=scale if key is not None and key.global_scale else None)


def stored_scheme(stored: StoredExperts, projection: str, resolved: ResolvedQuant) -> LinearScheme:
    """Of one projection of a checkpoint's experts."""
    found = stored.projections[projection]
    firsts = [resolved.schemes[half[0]] for half in found.halves]
    weight = halves_scheme([f.weight for f in firsts], found.shape[0], stored.name)
    return LinearScheme(weight, firsts[0].input)


def _unfilled(module: LinearModule) -> LinearModule:
    """A linear like `module`, on the meta device."""
    out_features, in_features = linear_shape(module)
    dtype, has_bias = module.weight.dtype, module.bias is not None
    with torch.device("meta"):
        if isinstance(module, Conv1D):
            return Conv1D(out_features, in_features).to(dtype)
        return nn.Linear(in_features, out_features, bias=has_bias, dtype=dtype)
