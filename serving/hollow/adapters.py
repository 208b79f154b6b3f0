"""Adapters beside a model without weights: what each holds where, and nothing that could run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...adapters.assemble import base_need
from ...adapters.base import BaseFacts
from ...adapters.branch import holder_of
from ...adapters.check import LoadPlan
from ...adapters.config_file import load_config, parse_config
from ...adapters.contents import planned_contents
from ...adapters.read import checked_plan, open_tensors, read_adapter, read_config
from ...adapters.sources import AdapterSource, SourceReader
from ...adapters.version import AdapterInfo, AdapterState, Tier
from ...core.errors import AdapterExistsError, AdapterNotFoundError
from ...linear.parts import Part
from ...linear.registry import Holder, Holding, LayerRegistry

#: What DoRA and its like come to once the base's weights are known.
_SCALED = Part.LOW_RANK | Part.GAIN


@dataclass(frozen=True)
class _Shape:
    """What adapters of one config and one header have in common."""

    layers: Mapping[str, Holder]
    info: AdapterInfo


class HollowAdapters:
    """Adapters of one model without weights, read as far as the audit needs it.

    Args:
        registry: is told what they hold.
        facts: of the model.
        max_rank: of slots.
        reader: makes local folders of sources.
    """

    def __init__(
        self, registry: LayerRegistry, facts: BaseFacts, max_rank: int, reader: SourceReader
    ) -> None:
        self._registry = registry
        self._facts = facts
        self._max_rank = max_rank
        self._reader = reader
        self._identities = itertools.count(1)
        self._infos: dict[str, AdapterInfo] = {}
        self._held: dict[str, int] = {}
        self._shapes: dict[tuple[bytes, bytes], _Shape] = {}
        self._layers: dict[frozenset[tuple[str, Holder]], Mapping[str, Holder]] = {}
        self._pending: dict[int, Holding] = {}

    def list(self) -> Sequence[AdapterInfo]:
        """All of them, in the order in which they were added."""
        return tuple(self._infos.values())

    def live(self, names: Iterable[str]) -> Mapping[int, str]:
        """Identities of the contents behind names.

        Raises:
            AdapterNotFoundError: a name is unknown.
        """
        found: dict[int, str] = {}
        for name in names:
            if name not in self._held:
                raise AdapterNotFoundError(
                    f"adapter '{name}'", "was not given", f"known are {', '.join(self._held)}"
                )
            found[self._held[name]] = name
        return found

    def add(self, name: str, source: str, *, by_shape: bool = False) -> None:
        """Read an adapter; `enter` makes it known to the registry.

        Args:
            name: what the report calls it.
            source: as the manager takes it.
            by_shape: one whose config and header were seen before is not read any further.

        Raises:
            AdapterError: it could not be loaded on this model.
        """
        if name in self._held:
            raise AdapterExistsError(
                f"adapter '{name}'", "is given twice", "give each a name of its own"
            )
        parsed = AdapterSource.parse(source)
        with self._reader.resolve(parsed) as folder:
            shape = self._of_shape(folder) if by_shape else self._read(folder)
        info = shape.info
        self._infos[name] = AdapterInfo(
            name=name,
            digest=info.digest,
            source=parsed.label,
            rank=info.rank,
            modules=info.modules,
            nbytes=info.nbytes,
            slot=None,
            batches=0,
            notes=info.notes,
            state=AdapterState.READY,
            tier=Tier.DISK,
            peft_type=info.peft_type,
            parameters=info.parameters,
        )
        identity = self._held[name] = next(self._identities)
        self._pending[identity] = Holding(name, shape.layers)

    def enter(self) -> None:
        """Tell the registry of all that were added, in one step."""
        self._registry.set_holdings(self._pending, (), "adapters were read for an audit")
        self._pending = {}

    def _of_shape(self, folder: Path) -> _Shape:
        subject = f"adapter {str(folder)!r}"
        config = read_config(folder, subject)
        with open_tensors(folder, subject) as file:
            key = config, file.header
        if not key[1]:
            # Pickles have no header.
            return self._read(folder)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = self._read(folder)
        return found

    def _read(self, folder: Path) -> _Shape:
        subject = f"adapter {str(folder)!r}"
        config = read_config(folder, subject)
        parsed = parse_config(load_config(config, subject), subject)
        with open_tensors(folder, subject) as file:
            plan = checked_plan(
                parsed, file.headers, self._facts, max_rank=self._max_rank, subject=subject
            )
        if base_need(plan) is not None:
            return self._planned(plan)
        weights = read_adapter(folder, self._facts, max_rank=self._max_rank)
        layers = {name: holder_of(parts) for name, parts in sorted(weights.modules.items())}
        return self._shape(
            layers, weights.digest, weights.rank, weights.nbytes, weights.notes, weights.peft_type
        )

    def _planned(self, plan: LoadPlan) -> _Shape:
        """Of one that is computed with the base's weights, which are not here."""
        layers, ranks = {}, [0]
        for content in planned_contents(plan):
            if not content.reads_raw:
                layers[content.name] = Holder(Part.OWN)
            elif content.rank is None:
                layers[content.name] = Holder(Part.DELTA)
            else:
                ranks.append(content.rank)
                layers[content.name] = Holder(_SCALED, content.rank)
        note = f"{base_need(plan)} is computed with the base's weights: size and digest are told "
        notes = (*plan.notes, note + "by a load")
        return self._shape(layers, "", max(ranks), 0, notes, plan.tuner.peft_type)

    def _shape(
        self,
        layers: Mapping[str, Holder],
        digest: str,
        rank: int,
        nbytes: int,
        notes: tuple[str, ...],
        peft_type: str,
    ) -> _Shape:
        # Adapters that touch the same places alike share the mapping, and so all plans.
        shared = self._layers.setdefault(frozenset(layers.items()), MappingProxyType(dict(layers)))
        info = AdapterInfo(
            "", digest, "", rank, len(layers), nbytes, None, 0, notes, peft_type=peft_type
        )
        return _Shape(shared, info)
