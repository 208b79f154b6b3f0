"""What a fusion policy is: which route a site takes, from what is live.

How to write one: docs/policies.md.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel

from ..core.platform import Platform
from ..core.quant_key import QuantKey
from ..core.route import Route
from ..fusion.traffic import SiteTraffic
from ..linear.batch_class import BatchClass
from ..linear.registry import RawReader


class RouteChoice(NamedTuple):
    """A policy's answer for one site."""

    route: Route
    reason: str


@dataclass(frozen=True)
class SiteState:
    """What a policy may look at.

    Attributes:
        raw_readers: who reads the site's output raw in this batch.
        may_carry_adapters: some consumer could take an adapter branch, now or ever.
        kind: "activation" or "norm".
        columns: last dimension of the site's output.
        dtype: of its output.
        key: what its consumers accept.
        batch: the class of batches that is planned for; None where the policy does not ask.
        traffic: of the site in the largest batch of that class, its rows with adapters evenly
            spread over the adapters; None as `batch`.
    """

    raw_readers: tuple[RawReader, ...]
    may_carry_adapters: bool
    kind: str = "activation"
    columns: int = 0
    dtype: torch.dtype = torch.bfloat16
    key: QuantKey | None = None
    batch: BatchClass | None = None
    traffic: SiteTraffic | None = None


def label_of(policy: Policy) -> str:
    """A policy as it is written: its name, and options that are not its defaults."""
    options = []
    for name, default in _defaults(policy):
        value = getattr(policy, name)
        if value != default:
            options.append(f"{name}={value}")
    return f"{policy.name}:{','.join(options)}" if options else policy.name


def _defaults(policy: Policy) -> list[tuple[str, Any]]:
    if isinstance(policy, BaseModel):
        return [(name, field.default) for name, field in type(policy).model_fields.items()]
    if dataclasses.is_dataclass(policy):
        return [(field.name, field.default) for field in dataclasses.fields(policy)]
    return []


#: Routes that keep nothing for raw readers, or everything.
PLAIN_ROUTES = frozenset({Route.UNFUSED, Route.FUSED})


class Policy(ABC):
    """Chooses a route for a site that could be fused; pure.

    Policies are values: two that are equal share their plans.

    Attributes:
        name: of the policy, as in `make_policy`.
        routes: what it may choose; nothing else is taken from it.
        by_batch: its choice depends on the class of the batch (`SiteState.batch`), so that there
            is a plan for each.
    """

    name: ClassVar[str]
    routes: ClassVar[frozenset[Route]] = frozenset(Route)
    by_batch: ClassVar[bool] = False

    @abstractmethod
    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        """Routes in order of preference, each with its reason.

        The first one that a producer can serve is taken; where none can, the site is unfused.  A
        route that `allowed_routes` does not have is refused.
        """

    def bound(self, platform: Platform) -> Policy:
        """This policy on a device; what it has to read (a calibration) it reads here, once."""
        return self


def allowed_routes(readers: tuple[RawReader, ...]) -> frozenset[Route]:
    """Routes by which every one of `readers` finds what it reads (I1); pure.

    A hook or unknown code reads what it finds in the place of a tensor; what is changed before it
    is multiplied cannot be codes already; only LoRA shrinks are absorbed.
    """
    if not readers:
        return PLAIN_ROUTES
    if any(reader.kind != "branch" or reader.changes_input for reader in readers):
        return frozenset({Route.UNFUSED})
    if any(reader.shrink_rank is None for reader in readers):
        return frozenset({Route.UNFUSED, Route.DUAL})
    return frozenset({Route.UNFUSED, Route.DUAL, Route.ABSORBED})
