"""The registry of producers, and the choice among them with every reason kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import KernelUnavailableError, RegistryError
from ..core.quant_key import QuantKey
from ..core.route import Route
from .producers.base import Producer, ProducerRequest

EntryKey = tuple[str, QuantKey, Route]


@dataclass(frozen=True)
class Rejection:
    """A candidate that was not chosen, and why."""

    name: str
    reason: str


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
    """Ordered candidates by (semantics, quant key, route)."""

    def __init__(self) -> None:
        self._entries: dict[EntryKey, list[Producer]] = {}

    def register(self, semantics: str, key: QuantKey, route: Route, producer: Producer) -> None:
        """Add the last-choice candidate of an entry.

        Args:
            semantics: ``str(semantics)`` of the sites it serves, such as "silu_mul".
            key: the key whose codes it emits.
            route: what it emits beside them.
            producer: the implementation.

        Raises:
            RegistryError: no predicate, or the name is registered twice.
        """
        subject = f"producer {getattr(producer, 'name', producer)!r} for {semantics} -> {key}"
        if not isinstance(producer, Producer):
            raise RegistryError(subject, "has no predicate", "subclass branchline.fusion.Producer")
        candidates = self._entries.setdefault((semantics, key, route), [])
        if any(candidate.name == producer.name for candidate in candidates):
            raise RegistryError(subject, "is registered already", "choose another name")
        candidates.append(producer)

    def entries(self) -> dict[EntryKey, tuple[Producer, ...]]:
        """Everything registered, in order of preference."""
        return {key: tuple(candidates) for key, candidates in self._entries.items()}

    def select(self, request: ProducerRequest, force: str | None = None) -> Selection:
        """The first candidate whose predicate accepts, with the trace of those before it.

        Args:
            request: the site, the key, the route and the platform.
            force: name of the only candidate that may be chosen.

        Raises:
            KernelUnavailableError: `force` names a candidate that is unknown or cannot run (I14).
        """
        candidates = self._entries.get((str(request.semantics), request.key, request.route), [])
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
        known = {p.name for entry in self._entries.values() for p in entry}
        if force and (candidates or force not in known):
            why = "; ".join(f"{r.name}: {r.reason}" for r in rejected) or f"{what} is registered"
            raise KernelUnavailableError(f"producer {force!r}", why, "drop the forced choice")
        reason = f"{what} runs here" if candidates else f"{what} is registered"
        return Selection(None, tuple(rejected), reason)


REGISTRY = ProducerRegistry()


def producer(
    semantics: str, key: QuantKey, route: Route = Route.FUSED
) -> Callable[[type[Producer]], type[Producer]]:
    """Class decorator: register one instance of a producer in the default registry."""

    def register(cls: type[Producer]) -> type[Producer]:
        REGISTRY.register(semantics, key, route, cls())
        return cls

    return register
