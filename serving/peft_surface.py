"""The methods that code written for `peft.PeftModel` calls, on a served model.

The active adapter is what rows take that nobody named another way.  A call reads it once, when it
starts: what another thread sets meanwhile is for the next call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from peft import PeftConfig
from peft.peft_model import TunerLayerStatus, TunerModelStatus
from torch import nn

from ..adapters.disabled import disabled, is_disabled
from ..adapters.manager import AdapterManager
from ..adapters.ready import RowName
from ..adapters.sources import AdapterSource, HubSource, LocalSource
from ..adapters.version import AdapterInfo
from ..core.errors import (
    AdapterNotFoundError,
    AdapterUnsupportedError,
    BatchError,
    ConfigError,
)
from ..linear.batch import BatchScope, active_batch
from ..linear.registry import LayerRegistry
from .peft_status import PeftConfigs, layer_status, model_status

# What PEFT offers that would change the base, or make a new adapter.
_MERGE = (
    "the base serves rows without that adapter too, and a sum rounded to a quantised weight's "
    "codes would lose most of what the adapter adds",
    "name the adapter for the rows that want it, or merge before the model is quantised",
)
REFUSED: Mapping[str, tuple[str, str]] = {
    "merge_adapter": _MERGE,
    "merge_and_unload": _MERGE,
    "unmerge_adapter": ("nothing is ever merged into the base", "drop the call"),
    "unload": ("it would leave a model without this one's linears", "use unwrap()"),
    "add_adapter": ("a new adapter without weights has to be trained", "use load_adapter"),
    "add_weighted_adapter": (
        "a mixture would be a new adapter made of others' weights",
        "name the mixture in the rows that want it: adapter_names=[{'sql': 0.7, 'tone': 0.3}]",
    ),
    "set_requires_grad": ("a served model cannot be trained", "unwrap it first"),
}

# Keywords of PEFT's `load_adapter` that change nothing where adapters are only served.
_HARMLESS = ("autocast_adapter_dtype", "low_cpu_mem_usage")


@dataclass(frozen=True)
class LoadResult:
    """What `load_adapter` returns; the lists are empty, for what would be in them is refused.

    Attributes:
        info: the listing's line.
        missing_keys: of the model's.
        unexpected_keys: of the adapter's.
    """

    info: AdapterInfo
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What rows take that nobody named; one value, so that a reader never sees half a change.

    Attributes:
        name: the active adapter; None for none.
        enabled: False after `disable_adapters`.
    """

    name: str | None = None
    enabled: bool = True


class PeftSurface:
    """Mixed into `ServedModel`, which sets the attributes.

    Attributes:
        model: the wrapped model.
        adapters: its manager.
        registry: its linears.
    """

    model: nn.Module
    adapters: AdapterManager
    registry: LayerRegistry
    _choice = Choice()

    # --- adapters -------------------------------------------------------------------------------

    def load_adapter(
        self,
        model_id: str | os.PathLike[str],
        adapter_name: str = "default",
        *,
        is_trainable: bool = False,
        torch_device: str | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        **kwargs: Any,
    ) -> LoadResult:
        """Load an adapter; it is not made active.  A name in use is swapped, config and weights.

        Args:
            model_id: a folder, an archive, a URL, or a repository of the hub (`owner/name`, where
                no such folder exists).
            adapter_name: what rows call it.
            is_trainable: must be False.
            torch_device: must be None, or the model's.
            revision: of a repository of the hub.
            subfolder: below the folder or repository.
            **kwargs: PEFT's other keywords; those that would have an effect here are refused.

        Raises:
            ConfigError: a keyword that cannot be served.
            AdapterError: see `AdapterManager.load`; nothing has changed then.
        """
        subject = f"load_adapter of {adapter_name!r}"
        refused = [n for n, value in kwargs.items() if value and n not in _HARMLESS]
        if is_trainable or refused:
            name = "is_trainable" if is_trainable else refused[0]
            raise ConfigError(f"{name}= in {subject}", "is not served", "drop it")
        device = next(iter(self.registry)).device
        if torch_device not in (None, device.type, str(device)):
            reason = f"adapters lie where the model does, on {device}"
            raise ConfigError(f"torch_device={torch_device!r} in {subject}", reason, "drop it")
        source = _peft_source(model_id, revision, subfolder)
        if self._knows(adapter_name):
            return LoadResult(self.adapters.swap(adapter_name, source))
        # The manager may have unloaded what was active under this name: loading activates nothing.
        self._forget(adapter_name)
        return LoadResult(self.adapters.load(adapter_name, source))

    def hotswap_adapter(self, model_id: str | os.PathLike[str], adapter_name: str) -> AdapterInfo:
        """Give the adapter of exactly this name new weights; calls in flight finish on the old.

        Args:
            model_id: as in `load_adapter`.
            adapter_name: in use already.

        Raises:
            AdapterNotFoundError: the name, or the source, is unknown.
            AdapterError: see `AdapterManager.swap`; nothing has changed then.
        """
        return self.adapters.swap(adapter_name, _peft_source(model_id, None, None))

    def delete_adapter(self, adapter_name: str) -> None:
        """Forget an adapter.  Where it was active none is afterwards, never another one.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        if not self._knows(adapter_name):
            # Says which there are.
            self.adapters.info(adapter_name)
        self._forget(adapter_name)
        self.adapters.unload(adapter_name)

    def set_adapter(self, adapter_name: str | Sequence[str], inference_mode: bool = True) -> None:
        """Make an adapter the active one: calls that name none give it to all their rows.

        Args:
            adapter_name: the adapter; a list of one is the same.
            inference_mode: whatever it is, nothing becomes trainable.

        Raises:
            AdapterNotFoundError: there is no such adapter; the active one stays.
            AdapterUnsupportedError: several adapters for one row, or none.
        """
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        if len(names) != 1:
            raise AdapterUnsupportedError(
                f"set_adapter({names!r})",
                "one adapter is active, or none",
                "name one, disable_adapters() for none, or name a mixture for each row: "
                "adapter_names=[{'sql': 0.7, 'tone': 0.3}]",
            )
        self.adapters.info(names[0])
        self._choice = Choice(names[0], self._choice.enabled)

    def enable_adapters(self) -> None:
        """Take `disable_adapters` back; the active adapter is the one it was."""
        self._choice = Choice(self._choice.name, True)

    def disable_adapters(self) -> None:
        """Serve the base for all rows of all threads, whatever they name, from the next call on."""
        self._choice = Choice(self._choice.name, False)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Inside, the calls of this thread (or task) serve the base for all rows, named or not.

        That goes for calls of the wrapped model itself, too, and for `adapters.rows` blocks that
        are open already or are opened inside; afterwards a block that is still open goes on.
        """
        owner = self.registry.owner
        with ExitStack() as stack:
            stack.enter_context(disabled(owner))
            if active_batch(owner) is not None:
                stack.enter_context(self._base_scope())
            yield

    @property
    def active_adapter(self) -> str | None:
        """The active adapter; None for none."""
        name = self._choice.name
        if name is not None and not self._knows(name):
            # Unloaded by the manager.
            self._forget(name)
            return None
        return name

    @property
    def active_adapters(self) -> list[str]:
        """The active adapter in a list, which is empty for none."""
        name = self.active_adapter
        return [] if name is None else [name]

    # --- what there is --------------------------------------------------------------------------

    @property
    def peft_config(self) -> Mapping[str, PeftConfig]:
        """PEFT's config of every adapter that was read; a view that cannot be written."""
        return PeftConfigs(self.adapters)

    def get_base_model(self) -> nn.Module:
        """The wrapped model; called directly it serves the base."""
        return self.model

    def get_model_status(self) -> TunerModelStatus:
        """PEFT's summary of the adapters, their state and their size."""
        return model_status(self.model, self.adapters, self.get_layer_status(), self._state())

    def get_layer_status(self) -> list[TunerLayerStatus]:
        """PEFT's summary of each module that an adapter has weights for, by the model's names."""
        return layer_status(self.registry, self.adapters, self._state())

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Trainable parameters, of which there are none, and all, those of adapters included."""
        status = self.get_model_status()
        return status.trainable_params, status.total_params

    # --- the scope of a call --------------------------------------------------------------------

    def _scope(self, adapter_names: Sequence[RowName] | None, rows: int | None) -> Any:
        """What a call runs in: decided now, and kept until it ends.

        Args:
            adapter_names: one for each row; None where the call names none.
            rows: how many there are; None where that is unknown.

        Raises:
            BatchError: rows that nobody can count would take the active adapter.
        """
        if not self._choice.enabled or is_disabled(self.registry.owner):
            if adapter_names is None or isinstance(adapter_names, str):
                return self._base_scope()
            return self.adapters.rows_of_call([None] * len(adapter_names))
        if adapter_names is not None:
            return self.adapters.rows_of_call(adapter_names)
        batch = active_batch(self.registry.owner)
        name = self._choice.name
        if batch is not None or name is None:
            return self._base_scope() if batch is None else ExitStack()
        if rows is None:
            raise BatchError(
                f"a call for adapter '{name}', which is active",
                "has no input whose rows could be counted",
                "pass adapter_names=[...]",
            )
        return self._active_scope(name, rows)

    def _base_scope(self) -> Any:
        return BatchScope(self.registry.owner, self.adapters.base_batch())

    @contextmanager
    def _active_scope(self, name: str, rows: int) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(self.adapters.rows_of_call([name] * rows))
            except AdapterNotFoundError:
                if self._knows(name):
                    raise
                # The manager unloaded it: that leaves the plain base, as deleting it does.
                self._forget(name)
                stack.enter_context(self._base_scope())
            yield

    def _state(self) -> Choice:
        off = is_disabled(self.registry.owner)
        return Choice(self.active_adapter, self._choice.enabled and not off)

    def _knows(self, name: str) -> bool:
        try:
            self.adapters.info(name)
        except AdapterNotFoundError:
            return False
        return True

    def _forget(self, name: str) -> None:
        if self._choice.name == name:
            self._choice = Choice(None, self._choice.enabled)


def _peft_source(
    model_id: str | os.PathLike[str], revision: str | None, subfolder: str | None
) -> AdapterSource:
    text = os.fspath(model_id)
    if HubSource.is_repository(text) and not os.path.lexists(text):
        # As PEFT reads it; everywhere else a repository is written hf://owner/name.
        return HubSource(text, revision, (subfolder or "").strip("/"))
    source = AdapterSource.parse(model_id)
    if isinstance(source, HubSource):
        folder = "/".join(part for part in (source.folder, subfolder or "") if part)
        return HubSource(source.repository, revision or source.revision, folder)
    if revision is not None:
        raise ConfigError(f"revision={revision!r}", f"{source.label} has none", "drop it")
    if subfolder and isinstance(source, LocalSource):
        return LocalSource(os.path.join(source.path, subfolder), source.root)
    if subfolder:
        raise ConfigError(f"subfolder={subfolder!r}", "is not served here", "put it in the URL")
    return source
