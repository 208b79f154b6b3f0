"""`wrap`: from a transformers (or PEFT) model to one that serves adapters on an FP8 base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..adapters.base import BaseFacts
from ..adapters.from_peft import TakenAdapter, peft_layers, take_from_peft, unwrap_peft
from ..adapters.manager import AdapterManager
from ..adapters.sources import SourceReader
from ..core.errors import (
    CalibrationError,
    ConfigError,
    KernelUnavailableError,
    WrapError,
)
from ..core.platform import Platform, detect_platform
from ..core.route import Route
from ..fusion import REGISTRY, discover
from ..fusion.discover import Discovery
from ..fusion.site import Site
from ..linear.base_weights import BaseWeightsOf
from ..linear.batch import FusionRules
from ..linear.calibration import Calibration, Observer, calibrate
from ..linear.contract import InputContract
from ..linear.experts.quantized import QuantizedExperts
from ..linear.hooks import move_hooks, unwatch_hooks
from ..linear.kernels.base import LinearKernel, QuantizedKernel
from ..linear.kernels.build import build_kernel, calibrated_contract
from ..linear.kernels.float import FloatLinear
from ..linear.kernels.float_selection import build_float_kernel, give_weight_back
from ..linear.quantized_linear import QuantizedLinear
from ..linear.quantized_weight import QuantizedWeight
from ..linear.registry import LayerRegistry, Unwrapped
from ..linear.weights import (
    AnyLinear,
    FoundLinear,
    find_linears,
    float_weight,
    linear_device,
    replace_module,
)
from ..policies.planner import Planner
from ..policies.policy import StaticPolicy, make_policy
from .base_facts import base_facts
from .config import WrapConfig
from .experts import ModelExperts
from .inputs import Prompts, calibration_batches, example_inputs
from .model import ServedModel
from .parallel.split import SplitModel
from .places import find_places
from .row_tokens import RowTokens
from .settings import ignored_linears

# Settings that a quantised checkpoint has answered.
_HOW_TO_QUANTIZE = ("quant", "ignore", "quantize_lm_head")


def wrap(
    model: nn.Module,
    *,
    calibration: Prompts | Calibration | str | Path | None = None,
    tokenizer: Any = None,
    example: Mapping[str, torch.Tensor] | None = None,
    **settings: Any,
) -> ServedModel:
    """Wrap `model` for serving; its linears are replaced in place.

    Args:
        model: a transformers model, or a `PeftModel`, whose adapters are taken over.
        calibration: for quant="fp8-static": prompts (texts, token ids or keyword arguments), or
            what an earlier calibration saved (a `Calibration` or the path of its file).
        tokenizer: for prompts that are texts; found beside the model's weights where None.
        example: keyword arguments of two rows for the recorded forward, where token ids will not
            do.
        **settings: fields of `WrapConfig`: quant, policy, max_loras, max_lora_rank, ...

    Returns:
        the served model: call it, `generate` with it, manage its `adapters`, `audit` it.

    Raises:
        ConfigError: a setting that cannot work.
        CalibrationError: static scales without usable calibration.
        WrapError: a model that cannot be wrapped.
        AdapterError: an adapter of the `PeftModel` that cannot be served.
        In every case the model is as it was.
    """
    config = WrapConfig.checked(**settings)
    if not isinstance(model, nn.Module):
        raise WrapError(f"{type(model).__qualname__}", "is no torch module", "pass a loaded model")
    if isinstance(model, ServedModel):
        raise WrapError("the model", "is wrapped already", "unwrap it, or use it as it is")
    # Tensors made in inference mode could not be written by a later load.
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
        served = Wrapping(model, config, undo).run(calibration, tokenizer, example)
        served.undo = undo.pop_all()
    return served


class Wrapping:
    """One run of `wrap`; every change of the model registers how to take it back.

    Args:
        model: to wrap.
        config: how.
        undo: takes everything back.
    """

    def __init__(self, model: nn.Module, config: WrapConfig, undo: ExitStack) -> None:
        self.config = config
        self.limits = config.tier_limits
        self.undo = undo
        self.registry = LayerRegistry()
        self.adapters: dict[str, TakenAdapter] = {}
        self.platforms: dict[torch.device, Platform] = {}
        self.training = model.training
        self.model = self._take_over(model)
        modules = self.model.modules()
        self.quantized = sum(
            isinstance(module, QuantizedLinear | QuantizedExperts) for module in modules
        )

    def run(
        self,
        calibration: Prompts | Calibration | str | Path | None,
        tokenizer: Any,
        example: Mapping[str, torch.Tensor] | None,
    ) -> ServedModel:
        """All steps."""
        found, ranges = self.prepare(calibration, tokenizer, example)
        planner = self.planner(found)
        adapters, policy = self.limits.count > 0, planner.policy
        self.registry.rules = FusionRules(
            never_fused=adapters and isinstance(policy, StaticPolicy),
            producer=self.config.producer,
            shrink_width=self.limits.width if adapters and Route.ABSORBED in policy.routes else 0,
        )
        base_weights = self.split.base_weights(self.model, self.registry)
        manager = self._manager(planner, base_weights)
        self.registry.serve_base_batches_from(manager.base_batch)
        self._check_forced(planner)
        for name, taken in self.adapters.items():
            # Lowered with the weights that are served, as an adapter that is loaded later.
            manager.install(name, taken.lower(base_weights))
        served = ServedModel(
            self.model, self.config, self.registry, planner, manager, found, ranges
        )
        served.ranks = self.split.ranks
        self.undo.callback(served.watch_rows().remove)
        self._watch_tokens()
        return served

    def prepare(
        self,
        calibration: Prompts | Calibration | str | Path | None,
        tokenizer: Any,
        example: Mapping[str, torch.Tensor] | None,
    ) -> tuple[Discovery, Calibration | None]:
        """Route what can be routed, find the sites and put them in place, choose the kernels."""
        self.undo.callback(self.model.train, self.training)
        self.model.eval()
        self._check_settings(calibration)
        originals = self._route_linears()
        self.experts = self.find_experts()
        self.experts.route(self._platform(self._device()))
        skipped = self._ignored(originals)
        self._note_ties(originals, skipped)
        found = discover(self.model, self.registry, example or example_inputs(self.model))
        ranges = self._ranges(calibration, tokenizer)
        self._quantize(originals, skipped, ranges)
        self._choose_float_kernels(originals)
        _group_kernels(found.sites)
        self.registry.listen(lambda epoch, reason: _group_kernels(found.sites))
        found.install()
        self.undo.callback(found.uninstall)
        self._place_others(found)
        return found, ranges

    def _watch_tokens(self) -> None:
        """Where no adapter can come, or no place asks, a forward costs nothing more."""
        if self.limits.count and RowTokens.are_asked_for(self.registry):
            for handle in RowTokens(self.registry).watch(self.model):
                self.undo.callback(handle.remove)

    def planner(self, found: Discovery) -> Planner:
        """What makes the plans."""
        return Planner(
            self.registry,
            found.sites,
            REGISTRY,
            self._platform(self._device()),
            make_policy(self.config.policy),
            adapters_possible=self.limits.count > 0,
            lora_dtype=self._lora_dtype(),
            force=self.config.producer,
        )

    def find_experts(self) -> ModelExperts:
        """What routes the experts."""
        return ModelExperts(
            self.model, self.registry, self.undo, self.config.linear_kernel, self.split.experts
        )

    # --- steps ----------------------------------------------------------------------------------

    def _take_over(self, model: nn.Module) -> nn.Module:
        if not isinstance(model, PeftModel) and any(
            isinstance(module, BaseTunerLayer) for module in model.modules()
        ):
            raise WrapError(
                f"model {type(model).__qualname__}",
                "carries adapter layers that PEFT injected, but is no PeftModel",
                "wrap the PeftModel, or delete the adapters first and load them by name",
            )
        self.split = SplitModel.of(model, self.undo)
        self.base = base_facts(model).with_base_rules(
            allow_mismatch=self.config.allow_base_mismatch,
            reads_folders=self.config.allowed_roots is None,
        )
        self.split.localize(model, self.undo)
        if not isinstance(model, PeftModel):
            return model
        for name in model.peft_config:
            self.adapters[name] = take_from_peft(model, name, self.base, max_rank=self.limits.width)
        replaced = peft_layers(model)
        plain, _ = unwrap_peft(model)
        for name, module in replaced.items():
            self.undo.callback(replace_module, plain, name, module)
        return plain

    def _device(self) -> torch.device:
        return next(iter(self.registry)).device

    def _route_linears(self) -> dict[str, FoundLinear]:
        self.tied = [
            (name.rpartition(".")[0], parameter)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
        ]
        originals, refused = find_linears(self.model)
        self.registry.unwrapped += [Unwrapped(name, reason) for name, reason in refused.items()]
        if not originals:
            raise WrapError(
                f"model {type(self.model).__qualname__}",
                "has no linear that can be wrapped",
                "pass a model with nn.Linear or Conv1D layers",
            )
        for index, (name, found) in enumerate(originals.items()):
            module = found.module
            # A kernel takes the weight of a quantised linear over.
            device = linear_device(module)
            kernel = self._first_kernel(name, module)
            dtype = module.weight.dtype
            make = self.split.linear_class(name)
            layer = make(name, index, kernel, self.registry, dtype, device, module)
            move_hooks(module, layer)
            self.undo.callback(move_hooks, layer, module)
            self.undo.callback(unwatch_hooks, layer)
            for path in found.paths:
                replace_module(self.model, path, layer)
                self.undo.callback(replace_module, self.model, path, module)
            self.registry.add(layer)
        return originals

    def _first_kernel(self, name: str, module: AnyLinear) -> LinearKernel:
        """The model's own multiplication, until the wrap quantises it."""
        if not isinstance(module, QuantizedLinear):
            return FloatLinear(module)
        kernel = self._kernel(name, module.quantized_weight(), module.bias, module.contract)
        # Registered before the weight goes, so that nothing that happens in between loses it.
        self.undo.callback(lambda: module.restore(kernel.quantized_weight()))
        module.release()
        return kernel

    def _kernel(
        self,
        name: str,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        contract: InputContract,
    ) -> QuantizedKernel:
        platform = self._platform(weight.codes.device)
        return build_kernel(name, weight, bias, contract, platform, self.config.linear_kernel)

    def _platform(self, device: torch.device) -> Platform:
        # Asking reads the versions of packages from the disk, and there are hundreds of linears.
        if device not in self.platforms:
            self.platforms[device] = detect_platform(device)
        return self.platforms[device]

    def _ranges(
        self, calibration: Prompts | Calibration | str | Path | None, tokenizer: Any
    ) -> Calibration | None:
        if not self._calibrated():
            return None
        if calibration is None:
            raise CalibrationError(
                self._quant,
                "needs input scales, but no calibration was given",
                "wrap with calibration=prompts, or a saved one (command line: --calibration FILE), "
                "or with quant='fp8-dynamic' (command line: --quant fp8-dynamic)",
            )
        if isinstance(calibration, str | Path):
            calibration = Calibration.load(calibration)
        if isinstance(calibration, Calibration):
            calibration.check_belongs(self.registry.layers)
            return calibration
        batches = calibration_batches(self.model, calibration, tokenizer)
        return calibrate(self.model, self.registry, batches, Observer(self.config.percentile))

    def _check_settings(self, calibration: object) -> None:
        """Refuse settings that would otherwise be ignored."""
        given = [name for name in _HOW_TO_QUANTIZE if name in self.config.model_fields_set]
        if self.quantized and given:
            raise ConfigError(
                f"setting {given[0]}={getattr(self.config, given[0])}",
                f"the checkpoint is quantised already ({self.quantized} linears)",
                "drop the setting, or load an unquantised checkpoint",
            )
        static = self._calibrated()
        if not static and calibration is not None:
            subject = "a quantised checkpoint" if self.quantized else self._quant
            raise ConfigError(
                subject,
                "has no static scales to calibrate",
                "drop it, or use quant='fp8-static' (command line: --quant fp8-static)",
            )
        saved = isinstance(calibration, str | Path | Calibration)
        if "percentile" in self.config.model_fields_set and (saved or not static):
            raise ConfigError(
                f"percentile={self.config.percentile}",
                "only counts where scales are calibrated from prompts",
                "drop it, or wrap with quant='fp8-static' and prompts (command line: --quant "
                "fp8-static, and no --calibration of saved scales)",
            )

    @property
    def _quant(self) -> str:
        return f"quant='{self.config.quant}'"

    def _calibrated(self) -> bool:
        return self.config.quant.calibrated and not self.quantized

    def _quantize(
        self,
        originals: dict[str, FoundLinear],
        skipped: set[str],
        ranges: Calibration | None,
    ) -> None:
        scheme = self.config.quant.scheme
        if scheme is None or self.quantized:
            return
        skipped = skipped | self._whose_weight_is_read()
        for name, found in originals.items():
            module = found.module
            if name in skipped or isinstance(module, QuantizedLinear):
                continue
            weight = QuantizedWeight.from_float(float_weight(module), name, scheme.weight)
            contract = calibrated_contract(scheme, name, ranges, weight.codes.device)
            self.registry.layers[name].kernel = self._kernel(name, weight, module.bias, contract)
        self.experts.quantize(scheme, skipped, ranges, self._platform(self._device()))

    def _choose_float_kernels(self, originals: dict[str, FoundLinear]) -> None:
        """Of what stays unquantised; until now the model's own weights were there to be read."""
        tied = {entry.name for entry in self.ties}
        for name, found in originals.items():
            layer, module = self.registry.layers[name], found.module
            if isinstance(module, QuantizedLinear) or not isinstance(layer.kernel, FloatLinear):
                continue
            # Registered before the weight goes, and for whatever kernel is there at the end.
            self.undo.callback(lambda layer=layer: give_weight_back(layer.kernel))
            layer.kernel = build_float_kernel(
                name,
                module,
                self._platform(linear_device(module)),
                self.config.float_kernel,
                weight_read=layer.weight_was_read,
                keeps_weight=name in tied,
            )
        self.experts.choose_float_kernels(self.config.float_kernel, self._platform(self._device()))

    def _note_ties(self, originals: dict[str, FoundLinear], skipped: set[str]) -> None:
        """Say which linears share their weight with another module, and what became of it."""
        self.ties: list[Unwrapped] = []
        owners: dict[int, list[str]] = {}
        for name, parameter in self.tied:
            owners.setdefault(id(parameter), []).append(name)
        for name, found in originals.items():
            others = [o for o in owners.get(id(found.module.weight), []) if o != name]
            if not others:
                continue
            kept = "both stay" if name in skipped else "only the linear's own copy is"
            state = "unquantised" if name in skipped else "quantised"
            reason = f"its weight is tied to {', '.join(others)}; {kept} {state}"
            self.ties.append(Unwrapped(name, reason))
        self.registry.unwrapped += self.ties

    def _whose_weight_is_read(self) -> set[str]:
        # A model that computes with a weight itself would find none where it is quantised.
        read = [layer.name for layer in self.registry if layer.weight_was_read]
        self.registry.unwrapped += [
            Unwrapped(name, "not quantised: the model reads its weight itself") for name in read
        ]
        return set(read)

    def _ignored(self, originals: dict[str, FoundLinear]) -> set[str]:
        names = (*originals, *self.experts.projections)
        skipped = set(ignored_linears(names, self.config.ignore))
        head = self.base.output_embedding
        if head and not self.config.quantize_lm_head:
            skipped.add(head)
        return skipped

    def _check_forced(self, planner: Planner) -> None:
        """Plan once, so that what cannot work is refused now (I14)."""
        plan = planner.plan({}, make_policy("dynamic"))
        forced = self.config.producer
        if forced and all(site.producer != forced for site in plan.sites):
            reasons = dict.fromkeys(site.reason for site in plan.sites) or ["there are no sites"]
            raise KernelUnavailableError(
                f"producer {forced!r}",
                f"was forced, but no site can use it: {'; '.join(reasons)}",
                "wrap without producer= (command line: --producer)",
            )

    def _lora_dtype(self) -> torch.dtype:
        return self.config.lora_dtype.resolve(next(iter(self.registry)).dtype)

    def _manager(self, planner: Planner, base_weights: BaseWeightsOf) -> AdapterManager:
        some_layer = next(iter(self.registry))
        return AdapterManager(
            self.registry,
            self.facts_with_refusals(),
            limits=self.limits,
            dtype=self._lora_dtype(),
            device=some_layer.device,
            plan=planner.plan_batch,
            folders=SourceReader(self.config.source_limits),
            base_weights=base_weights,
        )

    def _place_others(self, found: Discovery) -> None:
        """Embeddings and norms cost a call each: not where no adapter can ever come."""
        self.refusals: dict[str, str] = {}
        if not self.limits.count:
            return
        places = find_places(self.model, self.base, self.registry, found, self.split.embeddings)
        self.undo.callback(places.uninstall)
        places.install(self.registry)
        self.refusals = places.refusals

    def facts_with_refusals(self) -> BaseFacts:
        """What adapters are checked against, once the model is prepared."""
        # A branch on a tied linear changes that linear's output and no weight.
        unwrapped = [u for u in self.registry.unwrapped if u not in self.ties]
        refusals = self.refusals | {u.name: u.reason for u in unwrapped}
        for layer in self.registry:
            if not layer.takes_branches:
                refusals[layer.name] = "its input does not keep the batch's rows apart"
        facts = self.base.with_refusals(refusals)
        if self.split.ranks is not None:
            self.split.ranks.check_alike("what takes no adapters", facts.refusals)
        return facts


def _group_kernels(sites: Iterable[Site]) -> None:
    for site in sites:
        site.group_kernels()
