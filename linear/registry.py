"""The layer registry: every routed linear of a model, who reads its input raw, and the epoch."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from ..core.errors import BatchError
from ..core.quant_key import QuantKey
from .batch import BarePlan, Batch, FusionRules, active_batch
from .hooks import global_hook_names, hook_names, watch_hooks
from .routed import RoutedLinear

_owners = itertools.count(1)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RawReader:
    """Something that reads a layer's input raw.

    Attributes:
        kind: "branch", "hook" or "unknown".
        name: the adapter, hook or module.
        layer: the layer (or module) it sits on.
        shrink_rank: the rank of a branch that does nothing with the activation but a LoRA shrink;
            None for every other reader.
    """

    kind: str
    name: str
    layer: str
    shrink_rank: int | None = None

    def __str__(self) -> str:
        what = {"branch": "adapter", "hook": "forward hook"}.get(self.kind, "reader")
        return f"{what} '{self.name}' on {self.layer}"


@dataclass(frozen=True)
class Holder:
    """One loaded adapter on one layer.

    Attributes:
        name: of the adapter.
        reads_raw: its branch reads the layer's raw input (one that acts on the output alone does
            not).
        shrink_rank: its rank, where all it does with the raw input is a LoRA shrink; else None.
    """

    name: str
    reads_raw: bool = True
    shrink_rank: int | None = None


@dataclass(frozen=True, eq=False)
class SharedInput:
    """Layers that read one tensor: one raw reader decides for all of them.

    Attributes:
        layers: names of the linears.
        others: whoever else reads it raw now (foreign hooks, unknown readers).
    """

    layers: tuple[str, ...]
    others: Callable[[], tuple[RawReader, ...]]


@dataclass(frozen=True)
class Unwrapped:
    """A linear that stays as it is, and why."""

    name: str
    reason: str


class LayerRegistry:
    """Knows each layer's branches and computes what must stay raw (I2).

    Every change of the adapter set, of a hook or of a base layer advances `epoch` and calls the
    listeners, so nothing derived from it can grow stale unseen.
    """

    def __init__(self) -> None:
        self.owner = next(_owners)
        self._layers: dict[str, RoutedLinear] = {}
        self._branches: dict[str, dict[int, Holder]] = {}
        self._unwatched: list[OrderedDict] = []
        self._shared: dict[str, SharedInput] = {}
        self._listeners: list[Callable[[int, str], None]] = []
        self._lock = threading.RLock()
        self._epoch = 0
        self._base_batch: Callable[[], Batch] = self._bare_batch
        self.unwrapped: list[Unwrapped] = []
        self.rules = FusionRules()

    # --- layers ---------------------------------------------------------------------------------

    @property
    def layers(self) -> Mapping[str, RoutedLinear]:
        """Every routed linear by its full name."""
        return MappingProxyType(self._layers)

    def __iter__(self) -> Iterator[RoutedLinear]:
        return iter(self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def add(self, layer: RoutedLinear) -> None:
        """Enter a layer; its foreign hooks are watched from now on."""
        self._layers[layer.name] = layer
        self._branches[layer.name] = {}
        self.watch(layer, layer.name)

    def watch(self, module: nn.Module, name: str) -> None:
        """Advance the epoch whenever a forward hook comes to, or goes from, `module`."""
        self._unwatched += watch_hooks(module, lambda: self.advance(f"a hook on {name} changed"))

    def hooks_unseen(self) -> tuple[str | int, ...]:
        """What the epoch does not cover: hooks on every module, and those older than the wrap."""
        return (*global_hook_names(), *map(len, self._unwatched))

    def get_input_quant_key(
        self, layer: RoutedLinear, live: Collection[int] | None = None
    ) -> QuantKey | None:
        """The key that the *complete* layer, branches and hooks included, accepts as its input.

        Args:
            layer: the layer.
            live: identities of the adapters used in the batch; None for all loaded ones.

        Returns:
            None where the base takes no codes, or where something reads the raw activation.
        """
        if self.requires_unquantized_input(layer, live):
            return None
        return layer.kernel.contract.key

    # --- raw readers (I2) -----------------------------------------------------------------------

    def branches(self, layer: RoutedLinear) -> Mapping[int, Holder]:
        """Adapters that hold weights on `layer`, by the identity of the loaded version."""
        return MappingProxyType(self._branches[layer.name])

    def share_input(self, shared: SharedInput) -> None:
        """Enter the layers that read one tensor together."""
        for name in shared.layers:
            self._shared[name] = shared

    def raw_readers(
        self, layer: RoutedLinear, live: Collection[int] | None = None
    ) -> tuple[RawReader, ...]:
        """Everything that reads this layer's input raw when the adapters `live` are in the batch.

        The input may feed other layers too; whoever reads it there is named here as well.

        Args:
            layer: the layer.
            live: identities of the adapters used in the batch; None for all loaded ones.
        """
        shared = self._shared.get(layer.name)
        names = shared.layers if shared else (layer.name,)
        readers = [reader for name in names for reader in self._readers_on(name, live)]
        if shared:
            readers += shared.others()
        readers += [RawReader("hook", hook, "every module") for hook in global_hook_names()]
        return tuple(readers)

    def _readers_on(self, name: str, live: Collection[int] | None) -> Iterator[RawReader]:
        for key, holder in self._branches[name].items():
            if holder.reads_raw and (live is None or key in live):
                yield RawReader("branch", holder.name, name, holder.shrink_rank)
        for hook in hook_names(self._layers[name]):
            yield RawReader("hook", hook, name)

    def requires_unquantized_input(
        self, layer: RoutedLinear, live: Collection[int] | None = None
    ) -> bool:
        """Whether some live branch, hook or unknown reader reads this layer's input raw (I2)."""
        return bool(self.raw_readers(layer, live))

    def set_branches(self, changes: Mapping[str, Mapping[int, Holder]], reason: str) -> None:
        """Replace the holders of some layers in one step and advance the epoch once.

        Args:
            changes: layer name -> its new holders.
            reason: for the listeners.
        """
        with self._lock:
            for name, holders in changes.items():
                self._branches[name] = dict(holders)
        self.advance(reason)

    # --- epoch ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Advanced by every change that can change a route."""
        return self._epoch

    def advance(self, reason: str) -> None:
        """Advance the epoch and tell the listeners; one that fails is logged and passed over."""
        with self._lock:
            self._epoch += 1
            epoch = self._epoch
        for listener in tuple(self._listeners):
            # Whatever a listener does wrong, the change has happened and its caller must know so:
            # the boundary to foreign code logs, it does not undo.
            try:
                listener(epoch, reason)
            except Exception:
                _logger.exception("a listener failed at epoch %d (%s)", epoch, reason)

    def listen(self, listener: Callable[[int, str], None]) -> None:
        """Call `listener(epoch, reason)` after every change."""
        self._listeners.append(listener)

    # --- the batch in flight --------------------------------------------------------------------

    def serve_base_batches_from(self, base_batch: Callable[[], Batch]) -> None:
        """Where to get the batch for forwards that name no adapters."""
        self._base_batch = base_batch

    def current_batch(self) -> Batch:
        """The batch of this context, or a batch of base rows.

        Raises:
            BatchError: the batch of this context has ended.
        """
        batch = active_batch(self.owner)
        if batch is not None:
            if batch.ended.is_set():
                raise BatchError(
                    "this context's batch",
                    "has ended: its rows() block was left in another thread or task",
                    "leave a rows() block where it was entered, or pass adapter_names= per call",
                )
            return batch
        return self._base_batch()

    def _bare_batch(self) -> Batch:
        """Before there are sites and adapters: nothing is routed, nothing branches."""
        return Batch(BarePlan((), (False,) * len(self)))
