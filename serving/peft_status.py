"""PEFT's view of a served model: status by module and as a whole, and configs by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.peft_model import TunerLayerStatus, TunerModelStatus
from peft.utils.peft_types import PeftType
from torch import nn

from ..adapters.manager import AdapterManager
from ..adapters.tuners import TUNERS
from ..adapters.version import AdapterInfo, Tier
from ..core.errors import AdapterNotFoundError, AdapterUnsupportedError
from ..linear.experts.kernels.base import QuantizedGroupedKernel
from ..linear.experts.layer import ExpertsLinear
from ..linear.kernels.base import QuantizedKernel
from ..linear.registry import LayerRegistry
from ..linear.routed import RoutedLayer, RoutedLinear

# What the classes of PEFT raise where a value is not one that they can work with.
_REFUSALS = (TypeError, ValueError, AttributeError, LookupError, ImportError)


class State(Protocol):
    """What is active, and whether anything is."""

    @property
    def name(self) -> str | None:
        """The active adapter."""
        ...

    @property
    def enabled(self) -> bool:
        """Whether adapters are."""
        ...


class PeftConfigs(Mapping[str, PeftConfig]):
    """PEFT's config of each adapter, made anew at each look: writing to one changes nothing.

    A look raises `KeyError` for an unknown name, and else what `peft_config` does.

    Args:
        adapters: whose; those that no batch has used, and so nobody has read yet, are left out.
    """

    def __init__(self, adapters: AdapterManager) -> None:
        self._adapters = adapters

    def __getitem__(self, name: str) -> PeftConfig:
        try:
            raw = dict(self._adapters.config(name))
        except AdapterNotFoundError as error:
            raise KeyError(name) from error
        return peft_config(name, raw)

    def __iter__(self) -> Iterator[str]:
        return (info.name for info in read_adapters(self._adapters))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def peft_config(name: str, raw: Mapping[str, Any]) -> PeftConfig:
    """An adapter's config as PEFT's class.

    Keys that change nothing in what its tensors mean are left out, all of them, where the class
    refuses one: nobody checked them.  A null is what an absent key is.

    Args:
        name: of the adapter.
        raw: its decoded adapter_config.json, of an adapter that was loaded.

    Raises:
        AdapterUnsupportedError: PEFT's class refuses what the adapter is served by; PEFT could not
            load it.
    """
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(raw["peft_type"])]
    known = {field.name for field in fields(kind) if field.init}
    given = {key: value for key, value in raw.items() if key in known and value is not None}
    try:
        return kind(**given)
    except _REFUSALS:
        served = TUNERS[raw["peft_type"]].keys.all_served
    try:
        return kind(**{key: value for key, value in given.items() if key in served})
    except _REFUSALS as error:
        raise AdapterUnsupportedError(
            f"peft_config of adapter '{name}'",
            f"PEFT's {kind.__name__} refuses the config that it is served by ({error})",
            "read adapters.config(name) for the keys as the file has them",
        ) from error


def read_adapters(adapters: AdapterManager) -> list[AdapterInfo]:
    """The listing without what was only registered."""
    return [info for info in adapters.list() if info.digest]


def layer_status(
    registry: LayerRegistry, adapters: AdapterManager, state: State
) -> list[TunerLayerStatus]:
    """Of each module that some adapter has weights for, in the model's order.

    Args:
        registry: the model's modules.
        adapters: its adapters.
        state: what is active.
    """
    infos = {info.name: info for info in read_adapters(adapters)}
    by_key: dict[int, list[str]] = {}
    for name in infos:
        for key in adapters.live([name]):
            by_key.setdefault(key, []).append(name)
    device, found = next(iter(registry)).device.type, []
    for place in registry.places.values():
        held = sorted(n for key in registry.branches(place, by_key) for n in by_key[key])
        if not held:
            continue
        found.append(
            TunerLayerStatus(
                name=place.name,
                module_type=type(place).__name__,
                enabled=state.enabled,
                active_adapters=[] if state.name is None else [state.name],
                merged_adapters=[],
                requires_grad=dict.fromkeys(held, False),
                available_adapters=held,
                devices={name: _devices(infos[name], device) for name in held},
                quantization_backend=_backend(place),
            )
        )
    return found


def model_status(
    model: nn.Module, adapters: AdapterManager, layers: list[TunerLayerStatus], state: State
) -> TunerModelStatus:
    """Of the whole model.

    Args:
        model: the wrapped one.
        adapters: its adapters.
        layers: from `layer_status`.
        state: what is active.
    """
    infos = read_adapters(adapters)
    backends = {layer.quantization_backend for layer in layers}
    devices: dict[str, set[str]] = {info.name: set() for info in infos}
    for layer in layers:
        for name, places in layer.devices.items():
            devices.setdefault(name, set()).update(places)
    names = [info.name for info in infos]
    return TunerModelStatus(
        base_model_type=type(model).__name__,
        adapter_model_type="ServedModel",
        peft_types={info.name: info.peft_type for info in infos},
        trainable_params=0,
        total_params=_base_parameters(model) + sum(info.parameters for info in infos),
        num_adapter_layers=len(layers),
        enabled=state.enabled,
        active_adapters=[] if state.name is None else [state.name],
        merged_adapters=[],
        requires_grad=dict.fromkeys(names, False),
        available_adapters=sorted(names),
        devices={name: sorted(places) for name, places in devices.items()},
        quantization_backend=backends.pop() if len(backends) == 1 else _mixed(backends),
    )


def _devices(info: AdapterInfo, device: str) -> list[str]:
    return {Tier.DEVICE: [device], Tier.HOST: ["cpu"], Tier.DISK: []}[info.tier]


def _backend(place: object) -> str | None:
    kernel = place.kernel if isinstance(place, RoutedLayer) else None
    quantized = isinstance(kernel, QuantizedKernel | QuantizedGroupedKernel)
    return str(kernel.contract.key) if quantized else None


def _mixed(backends: set[str | None]) -> str | None:
    return "irregular" if backends else None


def _base_parameters(model: nn.Module) -> int:
    """As many as the model had before it was wrapped; a tied weight counts once."""
    counted, total = set(), 0
    for module in model.modules():
        if isinstance(module, RoutedLinear):
            weight = module.kernel.float_weight()
            bias = module.bias
            if not isinstance(weight, nn.Parameter):
                # None, or a copy that the kernel made, which is shared with nobody.
                weight = None
                total += module.in_features * module.out_features
            own = [weight, bias]
        elif isinstance(module, ExpertsLinear):
            bias, own = module.kernel.bias(), []
            total += module.experts * module.in_features * module.out_features
            total += 0 if bias is None else bias.numel()
        else:
            own = list(module.parameters(recurse=False))
        for tensor in own:
            if tensor is not None and id(tensor) not in counted:
                counted.add(id(tensor))
                total += tensor.numel()
    return total
