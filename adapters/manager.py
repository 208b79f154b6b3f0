"""The adapter manager: load, swap, unload and list, while batches run.

A loaded adapter is a *version*: an identity of its own, a slot, and a count of the batches that
use it.  A name points at one version.  A swap points the name at a new version in another slot;
batches in flight finish on the one they started with, and its slot is emptied when the last of
them ends.  One slot more than `max_loras` exists, so that a swap never has to wait for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..core.errors import (
    AdapterCapacityError,
    AdapterExistsError,
    AdapterNotFoundError,
    BatchError,
    ConfigError,
)
from ..linear.batch import Batch, BatchPlan, active_batch, batch_scope
from ..linear.registry import Holder, LayerRegistry
from .base import BaseFacts
from .branch import LayerBranch, check_range
from .read import read_adapter
from .slots import SlotClasses
from .version import AdapterInfo, Version
from .weights import AdapterWeights

#: PEFT's name for "no adapter" in a list of adapter names.
BASE_NAME = "__base__"


class AdapterManager:
    """The adapters of one served model.

    Args:
        registry: its layers.
        base: what reading checks an adapter against.
        max_loras: how many adapters fit; 0 switches adapters off.
        max_lora_rank: the highest rank that fits.
        dtype: of the slots.
        device: of the slots.
        plan: makes (or finds) the plan for the adapters of a batch.
    """

    def __init__(
        self,
        registry: LayerRegistry,
        base: BaseFacts,
        *,
        max_loras: int,
        max_lora_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        plan: Callable[[Mapping[int, str]], BatchPlan],
    ) -> None:
        self._registry = registry
        self._base = base
        self._max_loras = max_loras
        self._max_rank = max_lora_rank
        self._dtype = dtype
        self._device = device
        self._plan = plan
        self._versions: dict[str, Version] = {}
        self._lock = threading.RLock()
        self._open = 0
        self._closed = False
        self._slots = SlotClasses.of({max_lora_rank: max_loras + 1 if max_loras else 0})
        self._free = list(range(len(self._slots)))
        self._stacks: dict[str, LayerBranch] = {}
        self._held = torch.zeros(len(registry), len(self._slots), dtype=torch.bool, device=device)

    # --- life cycle -----------------------------------------------------------------------------

    def load(self, name: str, path: str | Path) -> AdapterInfo:
        """Load the PEFT folder `path` under `name`; all or nothing (I8).

        Raises:
            AdapterExistsError: the name is taken.
            AdapterNotFoundError: no such folder.
            AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError: see `read_adapter`
                and `check_range`.
            AdapterCapacityError: no slot is free, or the rank is higher than the slots.
        """
        with self._lock:
            self._check_can_load(name)
        return self.install(name, self._read(path))

    def install(self, name: str, weights: AdapterWeights) -> AdapterInfo:
        """Load weights that are in memory already under `name`.

        Raises:
            AdapterExistsError: the name is taken.
            AdapterCapacityError: no slot is free.
        """
        check_range(name, weights, self._dtype)
        with self._changing():
            self._check_can_load(name)
            version = self._enter(name, weights)
            self._publish(added=version, removed=None, reason=f"adapter '{name}' was loaded")
            self._versions[name] = version
            return version.info()

    def swap(self, name: str, path: str | Path) -> AdapterInfo:
        """Point `name` at new weights; batches in flight finish on the old ones.

        Raises:
            AdapterNotFoundError: the name, or the folder, is unknown.
            AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError: see `read_adapter`
                and `check_range`.
            AdapterCapacityError: the rank is higher than the slots, or every spare slot still
                serves a batch in flight.
        """
        with self._lock:
            self._version(name)
        weights = self._read(path)
        check_range(name, weights, self._dtype)
        with self._changing():
            old = self._version(name)
            new = self._enter(name, weights)
            self._publish(added=new, removed=old, reason=f"adapter '{name}' was swapped")
            self._versions[name] = new
            return new.info()

    def unload(self, name: str) -> None:
        """Forget `name` at once; its slot is emptied when no batch uses it any more.

        Raises:
            AdapterNotFoundError: the name is unknown.
        """
        with self._changing():
            version = self._version(name)
            self._publish(added=None, removed=version, reason=f"adapter '{name}' was unloaded")
            del self._versions[name]

    def list(self) -> tuple[AdapterInfo, ...]:
        """Every loaded adapter, in the order of loading."""
        with self._lock:
            return tuple(version.info() for version in self._versions.values())

    def live(self, names: Iterable[str]) -> dict[int, str]:
        """Identities of the loaded versions behind `names`, for the planner.

        Raises:
            AdapterNotFoundError: a name is unknown.
        """
        with self._lock:
            return {self._version(name).key: name for name in names}

    # --- batches --------------------------------------------------------------------------------

    @contextmanager
    def rows(self, names: Sequence[str | None]) -> Iterator[Batch]:
        """Forwards inside take one adapter (or None) for each row of their batch.

        The choice holds for this thread (or task) only.  The versions that the names point at now
        are kept until the block ends, whatever is loaded, swapped or unloaded meanwhile.

        Args:
            names: one name, or None, for every row.

        Raises:
            AdapterNotFoundError: a name is unknown.
            BatchError: not a sequence of names, or an empty one; or a block of this model is open
                in this thread (or task) already, which two generators in turn would mix up.
        """
        if active_batch(self._registry.owner) is not None:
            raise BatchError(
                f"rows({names!r})",
                "another rows() block of this model is open here",
                "leave it first, or pass adapter_names= to each call",
            )
        with self.rows_of_call(names) as batch:
            yield batch

    @contextmanager
    def rows_of_call(self, names: Sequence[str | None]) -> Iterator[Batch]:
        """As `rows`, for one call that ends before anything else can run; overrides a block."""
        batch, versions = self._acquire(names)
        try:
            with batch_scope(self._registry.owner, batch):
                yield batch
        finally:
            batch.ended.set()
            self._release(versions)

    def base_batch(self) -> Batch:
        """The batch of forwards that name no adapter: base rows, any number of them."""
        self.refuse_if_closed()
        return Batch(self._plan({}))

    def _acquire(self, names: Sequence[str | None]) -> tuple[Batch, tuple[Version, ...]]:
        if isinstance(names, str) or not all(n is None or isinstance(n, str) for n in names):
            names = ()
        if not names:
            raise BatchError(
                f"rows({names!r})",
                "expected one adapter name, or None, for every row of the batch",
                "pass a list such as ['sql', None]",
            )
        with self._lock:
            self.refuse_if_closed()
            chosen = [None if n is None or n == BASE_NAME else self._version(n) for n in names]
            versions = tuple({v.key: v for v in chosen if v is not None}.values())
            plan = self._plan({version.key: version.name for version in versions})
            slots = self._slots_by_layer([-1 if v is None else v.slot for v in chosen])
            for version in versions:
                version.batches += 1
            self._open += 1
        return Batch(plan, len(chosen), slots), versions

    def _slots_by_layer(self, chosen: list[int]) -> torch.Tensor:
        """int32 (layers, rows): each row's slot where its adapter has a branch, else -1."""
        slots = torch.tensor(chosen, dtype=torch.int64).to(self._device)
        if not self._held.shape[1]:
            return slots.new_full((len(self._registry), len(chosen)), -1, dtype=torch.int32)
        held = self._held[:, slots.clamp(min=0)] & (slots >= 0)
        return torch.where(held, slots, -1).to(torch.int32)

    def _release(self, versions: tuple[Version, ...]) -> None:
        with self._changing():
            self._open -= 1
            for version in versions:
                version.batches -= 1
                self._reclaim(version)

    def close(self) -> None:
        """Refuse everything from now on: the model was unwrapped.

        Raises:
            ConfigError: batches are in flight.
        """
        with self._lock:
            if self._open:
                raise ConfigError(
                    "unwrap", f"{self._open} batches are in flight", "let them end first"
                )
            self._closed = True

    def refuse_if_closed(self) -> None:
        """Refuse where the model was unwrapped.

        Raises:
            ConfigError: it was.
        """
        if self._closed:
            raise ConfigError("this served model", "was unwrapped", "wrap the model again")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Under the lock, and outside of inference mode: its tensors cannot be written later."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.refuse_if_closed()
            yield

    # --- inside the lock ------------------------------------------------------------------------

    def _read(self, path: str | Path) -> AdapterWeights:
        return read_adapter(path, self._base, max_rank=self._max_rank)

    def _version(self, name: str) -> Version:
        version = self._versions.get(name)
        if version is None:
            loaded = ", ".join(f"'{n}'" for n in self._versions) or "none"
            raise AdapterNotFoundError(
                f"adapter '{name}'", f"is not loaded (loaded: {loaded})", "load it first"
            )
        return version

    def _check_can_load(self, name: str) -> None:
        if not isinstance(name, str) or not name.strip() or name == BASE_NAME:
            raise ConfigError(
                f"adapter name {name!r}", "is empty or reserved", "choose another name"
            )
        if name in self._versions:
            raise AdapterExistsError(
                f"adapter '{name}'",
                f"is loaded already, from {self._versions[name].info().source}",
                "swap it, unload it first, or choose another name",
            )
        if len(self._versions) >= self._max_loras:
            raise AdapterCapacityError(
                f"adapter '{name}'",
                f"{len(self._versions)} adapters are loaded and max_loras={self._max_loras}",
                "unload one, or wrap with a higher max_loras (command line: --max-loras)",
            )

    def _enter(self, name: str, weights: AdapterWeights) -> Version:
        """Write a free slot; nothing refers to it until it is published."""
        if not self._free:
            raise AdapterCapacityError(
                f"adapter '{name}'",
                "every spare slot still serves a batch in flight on an older version",
                "try again when those batches have ended, or wrap with a higher max_loras",
            )
        for layer in weights.layers:
            self._stack(layer)
        version = Version(name, self._free[0], weights)
        for layer, parts in weights.layers.items():
            self._stacks[layer].write(version.slot, parts)
        self._free.pop(0)
        return version

    def _stack(self, name: str) -> LayerBranch:
        stack = self._stacks.get(name)
        if stack is None:
            layer = self._registry.layers[name]
            stack = LayerBranch(
                name,
                self._slots,
                layer.in_features,
                layer.out_features,
                self._dtype,
                self._device,
            )
            self._stacks[name] = stack
            layer.branch = stack
        return stack

    def _publish(self, added: Version | None, removed: Version | None, reason: str) -> None:
        changes: dict[str, dict[int, Holder]] = {}

        def holders(name: str) -> dict[int, Holder]:
            if name not in changes:
                changes[name] = dict(self._registry.branches(self._registry.layers[name]))
            return changes[name]

        if added:
            for name, rank in added.shrink_ranks.items():
                holders(name)[added.key] = Holder(added.name, shrink_rank=rank)
                self._held[self._registry.layers[name].index, added.slot] = True
        if removed:
            for name in removed.shrink_ranks:
                holders(name).pop(removed.key)
            removed.retired = True
        self._registry.set_branches(changes, reason)
        if removed:
            self._reclaim(removed)

    def _reclaim(self, version: Version) -> None:
        """Empty the slot of a version that no name and no batch refers to."""
        if not version.retired or version.batches:
            return
        for name in version.shrink_ranks:
            self._stacks[name].clear(version.slot)
        self._held[:, version.slot] = False
        self._free.append(version.slot)
