"""The registry of producers, and the choice among them with every reason kept."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import KernelUnavailableError, RegistryError
from ..core.quant_key import QuantKey
from ..core.route import Route
from ..core.selection import Rejection
from .producers import ENTRIES, FAMILIES
from .producers.base import Producer, ProducerRequest

EntryKey = tuple[str, QuantKey, Route]


@dataclass(frozen=True)
class Selection:
    """The outcome of a choice: what was chosen, and what was not, in order.

    Attributes:
        producer: the chosen one; None where every candidate was rejected or none is registered.
        rejected: candidates before it, each with its reason.
        reason: one line for the audit where `producer` is None.
    """

    producer: Producer | None
    rejected: tuple[Rejection, ...] = ()
    reason: str = ""


class ProducerRegistry:
    """Ordered candidates by (family of semantics, plain key, route).

    Parameters of the semantics (an epsilon, a limit) and of the key (layout, padding) are no part
    of an entry's name: they are in the request that a candidate's predicate answers.
    """

    def __init__(self) -> None:
        self._entries: dict[EntryKey, list[Producer]] = {}

    def register(self, family: str, key: QuantKey, route: Route, producer: Producer) -> None:
        """Add the last-choice candidate of an entry.

        Args:
            family: `family` of the semantics it serves, such as "silu_mul".
            key: the plain key whose codes it emits.
            route: what it emits beside them.
            producer: the implementation.

        Raises:
            RegistryError: no predicate, a key with a layout, or a name that is registered twice.
        """
        subject = f"producer {getattr(producer, 'name', producer)!r} for {family} -> {key}"
        if not isinstance(producer, Producer):
            raise RegistryError(subject, "has no predicate", "subclass branchline.fusion.Producer")
        if key.arranged:
            raise RegistryError(
                subject,
                "names a layout, which a predicate decides about",
                f"register it for {key.plain()}",
            )
        candidates = self._entries.setdefault((family, key, route), [])
        if any(candidate.name == producer.name for candidate in candidates):
            raise RegistryError(subject, "is registered already", "choose another name")
        candidates.append(producer)

    def entries(self) -> dict[EntryKey, tuple[Producer, ...]]:
        """Everything registered, in order of preference."""
        return {key: tuple(candidates) for key, candidates in self._entries.items()}

    def candidates(self, family: str, key: QuantKey, route: Route) -> tuple[Producer, ...]:
        """Who may serve an entry, in order of preference.

        Raises:
            RegistryError: nobody is registered for it.
        """
        found = self._entries.get((family, key.plain(), route))
        if not found:
            families = dict.fromkeys(name for name, _, _ in tuple(self._entries))
            raise RegistryError(
                f"{route} producer for {family} -> {key}",
                "is not registered",
                f"register one; served are {', '.join(families) or 'no semantics at all'}",
            )
        return tuple(found)

    def select(self, request: ProducerRequest, force: str | None = None) -> Selection:
        """The first candidate whose predicate accepts, with the trace of those before it.

        Args:
            request: the site, the key, the route and the platform.
            force: name of the only candidate that may be chosen.

        Raises:
            KernelUnavailableError: `force` names a candidate that is unknown or cannot run (I14).
        """
        entry = (request.semantics.family, request.key.plain(), request.route)
        candidates = self._entries.get(entry, [])
        rejected: list[Rejection] = []
        for producer in candidates:
            if force and producer.name != force:
                rejected.append(Rejection(producer.name, f"{force!r} was forced"))
                continue
            verdict = producer.supports(request)
            if verdict.ok:
                return Selection(producer, tuple(rejected))
            rejected.append(Rejection(producer.name, verdict.reason))
        what = f"no {request.route} producer for {request.semantics} -> {request.key}"
        known = {p.name for entry in tuple(self._entries.values()) for p in entry}
        if force and (candidates or force not in known):
            why = "; ".join(f"{r.name}: {r.reason}" for r in rejected) or f"{what} is registered"
            raise KernelUnavailableError(
                f"producer {force!r}", why, "wrap without producer= (command line: --producer)"
            )
        reason = f"{what} runs here" if candidates else f"{what} is registered"
        return Selection(None, tuple(rejected), reason)


def _default() -> ProducerRegistry:
    registry = ProducerRegistry()
    made = {cls: cls() for classes in FAMILIES.values() for cls in classes}
    for family, key, route in ENTRIES:
        for cls in FAMILIES[family]:
            registry.register(family, key, route, made[cls])
    return registry


REGISTRY = _default()
