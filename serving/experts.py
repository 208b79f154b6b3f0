"""Experts of a model on their way to being served: found, routed, quantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from ..core.errors import WrapError
from ..core.platform import Platform
from ..core.scheme import LinearScheme
from ..fusion.experts import RoutedExperts
from ..linear.calibration import Calibration
from ..linear.experts.find import FoundExperts, find_experts, stored_weight
from ..linear.experts.form import ExpertsForm
from ..linear.experts.kernels.base import GroupedKernel
from ..linear.experts.kernels.each import FloatExperts
from ..linear.experts.kernels.native_bf16 import NativeBf16Experts
from ..linear.experts.kernels.selection import build_grouped_kernel
from ..linear.experts.layer import ExpertsLinear
from ..linear.experts.quantized import QuantizedExperts
from ..linear.experts.shard import ExpertsShard
from ..linear.hooks import move_hooks, unwatch_hooks
from ..linear.kernels.float_selection import FloatKernel
from ..linear.registry import LayerRegistry, Unwrapped
from ..linear.weights import replace_module
from .expert_kernels import float_experts, quantized_experts, unquantized_experts
from .experts_proof import ExpertsProof


class ModelExperts:
    """The experts of one model; every change registers how to take it back.

    Args:
        model: whose experts are replaced in place.
        registry: gets a layer for each projection, behind all linears.
        undo: takes everything back.
        force: name of the only kernel that may be chosen.
        shards: which experts are on this rank, by name, where they are split over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        registry: LayerRegistry,
        undo: ExitStack,
        force: str | None,
        shards: Mapping[str, ExpertsShard],
    ) -> None:
        self._model = model
        self._registry = registry
        self._undo = undo
        self._force = force
        self._shards = shards
        self._routed: list[RoutedExperts] = []
        self._owners: Counter[int] = Counter()

    @property
    def projections(self) -> dict[str, ExpertsLinear]:
        """Every projection by its full name."""
        return {layer.name: layer for e in self._routed for layer in (e.up, e.down)}

    def route(self, platform: Platform) -> None:
        """Put routed experts in the place of the model's own, unquantised as yet.

        Args:
            platform: facts about the device of the weights.

        Raises:
            KernelUnavailableError: no kernel serves the experts of a quantised checkpoint.
            WrapError: experts of a quantised checkpoint compute something else than their form.
        """
        found, refused = find_experts(self._model)
        self._registry.unwrapped += [Unwrapped(name, reason) for name, reason in refused.items()]
        self._owners = _owners(self._model)
        proof = ExpertsProof()
        for name, experts in found.items():
            module = experts.module
            if not self._is_proved(proof, experts):
                continue
            routed = self._make(name, module, experts.form, platform)
            move_hooks(module, routed)
            self._undo.callback(move_hooks, routed, module)
            for path in experts.paths:
                replace_module(self._model, path, routed)
                self._undo.callback(replace_module, self._model, path, module)
            self._routed.append(routed)

    def _is_proved(self, proof: ExpertsProof, experts: FoundExperts) -> bool:
        """Whether they compute what they are served by; else they stay the model's own."""
        name, module = experts.name, experts.module
        original = module.original if isinstance(module, QuantizedExperts) else module
        difference = proof.difference(name, original, experts.form)
        if difference and isinstance(module, QuantizedExperts):
            raise WrapError(
                f"experts '{name}'",
                f"hold codes, which only our kernels can multiply, but {difference}",
                "load an unquantised checkpoint: its experts stay the model's own",
            )
        if difference:
            self._registry.unwrapped.append(Unwrapped(name, difference))
        return not difference

    def _make(
        self, name: str, module: nn.Module, form: ExpertsForm, platform: Platform
    ) -> RoutedExperts:
        original, dtype, device = module, torch.float32, torch.device("cpu")
        if isinstance(module, QuantizedExperts):
            original, dtype, device = module.original, module.dtype, module.device
        else:
            weight = stored_weight(module, form, form.down_name)
            dtype, device = weight.dtype, weight.device
        layers = []
        for projection in (form.up_name, form.down_name):
            layer = ExpertsLinear(
                f"{name}.{projection}",
                len(self._registry),
                self._first_kernel(module, form, projection, platform),
                self._registry,
                dtype,
                device,
                by_token=projection == form.up_name,
                original=module,
            )
            self._registry.add(layer)
            self._undo.callback(unwatch_hooks, layer)
            layers.append(layer)
        up, down = layers
        shard = self._shards.get(name)
        up.shard = down.shard = shard
        return RoutedExperts(name, form, up, down, original, self._registry, shard=shard)

    def _first_kernel(
        self, module: nn.Module, form: ExpertsForm, projection: str, platform: Platform
    ) -> GroupedKernel:
        if not isinstance(module, QuantizedExperts):
            return float_experts(module, form, projection)
        contract = module.contracts[projection]
        weight = module.quantized_weight(projection)
        kernel = build_grouped_kernel(
            f"{module.name}.{projection}",
            weight,
            module.biases[projection],
            contract,
            platform,
            self._force,
        )
        # Registered before the weights go, so that nothing that happens in between loses them.
        self._undo.callback(lambda: module.restore(projection, kernel.quantized_weight()))
        module.release(projection)
        return kernel

    def quantize(
        self,
        scheme: LinearScheme,
        skipped: Iterable[str],
        ranges: Calibration | None,
        platform: Platform,
    ) -> None:
        """Quantise every projection but those of a checkpoint that is quantised already.

        Args:
            scheme: of weights and inputs.
            skipped: projections that stay as they are.
            ranges: observed inputs, for a scheme that needs them.
            platform: facts about the device of the weights.

        Raises:
            CalibrationError: a projection was not observed.
            KernelUnavailableError: no kernel serves it.
            ScaleError: weights that are not finite.
        """
        left = set(skipped)
        for routed, layer, _ in self._unquantized():
            if layer.name not in left:
                layer.kernel = quantized_experts(
                    layer, routed.form, scheme, ranges, platform, self._force
                )

    def choose_float_kernels(self, choice: FloatKernel, platform: Platform) -> None:
        """Of what stays unquantised; until now the model's own weights were there to be read.

        Args:
            choice: what was asked for.
            platform: facts about the device of the weights.

        Raises:
            KernelUnavailableError: the C kernels were asked for and cannot serve it (I14).
        """
        for routed, layer, module in self._unquantized():
            if not isinstance(layer.kernel, FloatExperts):
                continue
            # Registered before the weight goes, and for whatever kernel is there at the end.
            self._undo.callback(_give_back, layer)
            weight = module.get_parameter(layer.name.rpartition(".")[2])
            layer.kernel = unquantized_experts(
                layer,
                module,
                routed.form,
                platform,
                choice,
                keeps_weight=self._owners[id(weight)] > 1,
            )

    def _unquantized(self) -> Iterator[tuple[RoutedExperts, ExpertsLinear, nn.Module]]:
        """Every projection whose checkpoint holds no codes, and the model's own experts."""
        for routed in self._routed:
            module = routed.down.original
            assert module is not None
            if not isinstance(module, QuantizedExperts):
                for layer in (routed.up, routed.down):
                    yield routed, layer, module


def _owners(model: nn.Module) -> Counter[int]:
    """How many modules have a parameter, by its identity."""
    return Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )


def _give_back(layer: ExpertsLinear) -> None:
    if isinstance(layer.kernel, NativeBf16Experts):
        layer.kernel.give_back()
