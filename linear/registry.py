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
from .branching import Place
from .hooks import global_hook_names, hook_names, watch_hooks
from .parts import CHANGES_INPUT, READS_RAW, Part
from .routed import RoutedLayer, RoutedLinear

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
        changes_input: a branch by which the linears are fed something else than the site's output.
    """

    kind: str
    name: str
    layer: str
    shrink_rank: int | None = None
    changes_input: bool = False

    def __str__(self) -> str:
        what = {"branch": "adapter", "hook": "forward hook"}.get(self.kind, "reader")
        return f"{what} '{self.name}' on {self.layer}"


@dataclass(frozen=True)
class Holder:
    """What one adapter has in one place.

    Attributes:
        parts: the `Part`s of its branch.
        shrink_rank: its rank, where all it does with the raw input is a LoRA shrink; else None.
    """

    parts: int = Part.PLAIN
    shrink_rank: int | None = None

    @property
    def reads_raw(self) -> bool:
        """Whether it reads the layer's raw input; what acts on the output alone does not."""
        return bool(self.parts & READS_RAW)

    @property
    def changes_input(self) -> bool:
        """Whether the layer is fed something else than what its site made."""
        return bool(self.parts & CHANGES_INPUT)


@dataclass(frozen=True, eq=False)
class Holding:
    """What one adapter has in all places.

    Attributes:
        name: of the adapter.
        layers: by the name of the place; thousands of adapters of one shape may share this mapping.
    """

    name: str
    layers: Mapping[str, Holder]


@dataclass(frozen=True, eq=False)
class SharedInput:
    """Layers that read one tensor: one raw reader decides for all of them.

    Attributes:
        layers: names of the linears.
        others: whoever else reads it raw now (foreign hooks, unknown readers).
        maker: name of the module that makes it, which may itself take adapters.
    """

    layers: tuple[str, ...]
    others: Callable[[], tuple[RawReader, ...]]
    maker: str = ""


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
        self._layers: dict[str, RoutedLayer] = {}
        self._others: dict[str, Place] = {}
        # By adapter, not by layer: a change then costs the same however many there are.
        self._holdings: dict[int, Holding] = {}
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
    def layers(self) -> Mapping[str, RoutedLayer]:
        """Every routed linear, and every projection of experts, by its full name."""
        return MappingProxyType(self._layers)

    @property
    def linears(self) -> Iterator[RoutedLinear]:
        """The layers that are linears of their own, and no projections of experts."""
        return (layer for layer in self._layers.values() if isinstance(layer, RoutedLinear))

    def __iter__(self) -> Iterator[RoutedLayer]:
        return iter(self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def add(self, layer: RoutedLayer) -> None:
        """Enter a layer; its foreign hooks are watched from now on."""
        self._layers[layer.name] = layer
        self.watch(layer, layer.name)

    @property
    def places(self) -> Mapping[str, Place]:
        """Whatever takes adapters, by its full name: the linears, then embeddings and norms."""
        return MappingProxyType({**self._layers, **self._others})

    def add_place(self, place: Place) -> None:
        """Enter an embedding or a norm; its index comes after those of all linears."""
        self._others[place.name] = place

    def watch(self, module: nn.Module, name: str) -> None:
        """Advance the epoch whenever a forward hook comes to, or goes from, `module`."""
        self._unwatched += watch_hooks(module, lambda: self.advance(f"a hook on {name} changed"))

    def hooks_unseen(self) -> tuple[str | int, ...]:
        """What the epoch does not cover: hooks on every module, and those older than the wrap."""
        return (*global_hook_names(), *map(len, self._unwatched))

    def get_input_quant_key(
        self, layer: RoutedLayer, live: Collection[int] | None = None
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

    def branches(self, layer: Place, live: Collection[int] | None = None) -> Mapping[int, Holder]:
        """Adapters that hold weights in a place, by the identity of the version.

        Args:
            layer: the place.
            live: only these identities; None for all.
        """
        held = self._held_on(layer.name, live)
        return MappingProxyType({key: holder for key, _, holder in held})

    def holding(self, identity: int) -> Holding:
        """What one adapter has in all places.

        Raises:
            KeyError: no adapter of that identity is loaded.
        """
        return self._holdings[identity]

    def _held_on(
        self, name: str, live: Collection[int] | None
    ) -> Iterator[tuple[int, str, Holder]]:
        keys = tuple(self._holdings) if live is None else live
        for key in keys:
            holding = self._holdings.get(key)
            holder = holding and holding.layers.get(name)
            if holding and holder:
                yield key, holding.name, holder

    def share_input(self, shared: SharedInput) -> None:
        """Enter the layers that read one tensor together."""
        for name in shared.layers:
            self._shared[name] = shared

    def raw_readers(
        self, layer: RoutedLayer, live: Collection[int] | None = None
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
            # No producer computes with the weights of several adapters.
            readers += [
                RawReader("branch", adapter, shared.maker, changes_input=True)
                for _, adapter, _ in self._held_on(shared.maker, live)
            ]
        readers += [RawReader("hook", hook, "every module") for hook in global_hook_names()]
        return tuple(readers)

    def _readers_on(self, name: str, live: Collection[int] | None) -> Iterator[RawReader]:
        for _, adapter, holder in self._held_on(name, live):
            if holder.reads_raw:
                yield RawReader("branch", adapter, name, holder.shrink_rank, holder.changes_input)
        for hook in hook_names(self._layers[name]):
            yield RawReader("hook", hook, name)

    def requires_unquantized_input(
        self, layer: RoutedLayer, live: Collection[int] | None = None
    ) -> bool:
        """Whether some live branch, hook or unknown reader reads this layer's input raw (I2)."""
        return bool(self.raw_readers(layer, live))

    def set_holdings(
        self, added: Mapping[int, Holding], removed: Collection[int], reason: str
    ) -> None:
        """Enter and remove adapters in one step and advance the epoch once.

        Args:
            added: by the identity of the version.
            removed: identities; those that are unknown are passed over.
            reason: for the listeners.
        """
        with self._lock:
            # In between, whoever asks for all of them sees too many: raw where codes would do.
            self._holdings.update(added)
            for key in removed:
                self._holdings.pop(key, None)
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
