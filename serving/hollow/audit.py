"""The audit of a checkpoint's folder, without loading a weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from ...adapters.base import BaseFacts
from ...adapters.sources import SourceReader
from ...core.errors import AdapterError, BranchlineError
from ...core.platform import Platform
from ...fusion.discover import Discovery
from ...linear.checkpoint import ResolvedQuant, read_metadata
from ...policies.audit.build import Audited, audit
from ...policies.audit.report import AuditReport, Problem
from ...policies.cost import CostModel
from ...policies.planner import Planner
from ...policies.policy import Policy
from ..config import WrapConfig
from ..folder import UNREADABLE, unreadable
from ..load import refuse_codes
from ..shards import has_shards
from ..skeleton import Skeleton
from ..stored_model import StoredModel
from .adapters import HollowAdapters
from .model import hollow_model
from .wrapping import HollowWrapping

_SCALES = "input scales are not in headers: linears that one site feeds are taken to have the same"
_NO_FILES = "the folder holds no weights: the model is taken to be unquantised"


@dataclass(frozen=True, eq=False)
class HollowModel:
    """A model without weights, as wrapping would leave it.

    Attributes:
        config: of the model.
        planner: makes plans for it.
        found: its sites.
        facts: what adapters are checked against.
        resolved: how its checkpoint is quantised; None where it is not.
        assumptions: what headers do not tell.
    """

    config: PreTrainedConfig
    planner: Planner
    found: Discovery
    facts: BaseFacts
    resolved: ResolvedQuant | None
    assumptions: tuple[str, ...]

    @classmethod
    def of(
        cls, folder: Path, config: WrapConfig, platform: Platform, undo: ExitStack
    ) -> HollowModel:
        """Read a checkpoint's config and headers.

        Args:
            folder: of the checkpoint.
            config: how it would be wrapped.
            platform: of the device that it would be served on.
            undo: takes everything back.

        Raises:
            WrapError, CheckpointError, KernelUnavailableError: as `FolderAudit.run`.
        """
        skeleton = Skeleton.of(folder)
        stored, assumptions = _stored(skeleton, config)
        with torch.inference_mode(False), torch.no_grad():
            try:
                model = hollow_model(skeleton)
            except BranchlineError:
                raise
            except UNREADABLE as error:
                raise unreadable(folder, error) from error
            wrapping = HollowWrapping(model, config, undo, stored, platform)
            found, _ = wrapping.prepare(None, None, None)
        facts = wrapping.facts_with_refusals()
        resolved = None if stored is None else stored.resolved
        planner = wrapping.planner(found)
        return cls(skeleton.config, planner, found, facts, resolved, assumptions)


def _stored(skeleton: Skeleton, config: WrapConfig) -> tuple[StoredModel | None, tuple[str, ...]]:
    metadata = read_metadata(skeleton.folder)
    if metadata is None:
        if not has_shards(skeleton.folder):
            return None, (_NO_FILES,)
        refuse_codes(skeleton.folder, whole=False)
        return None, (_SCALES,) if config.quant.calibrated else ()
    stored = StoredModel.read(skeleton.model, metadata, skeleton.headers_alone)
    calibrated = any(scheme.calibrated for scheme in stored.resolved.schemes.values())
    return stored, (_SCALES,) if calibrated else ()


@dataclass(frozen=True)
class Fleet:
    """Many adapters, named by their folders.

    Attributes:
        folder: whose sub-folders are adapters.
        weights: how often each is used, by name; None for all alike.
    """

    folder: Path
    weights: Mapping[str, float] | None = None

    def sources(self) -> Iterator[tuple[str, str]]:
        """Name and source of each, in order of name.

        Raises:
            OSError: the folder cannot be read.
        """
        for path in sorted(self.folder.iterdir()):
            if path.is_dir():
                yield path.name, str(path)


@dataclass(frozen=True)
class FolderAudit:
    """What is audited, and as if served how.

    Attributes:
        folder: of the checkpoint.
        config: how it would be wrapped.
        platform: of the device that it would be served on.
        model: costs of that device.
        policies: to plan by.
        adapters: sources by name.
        fleet: further adapters.
        tokens: of the batches that bytes and seconds are counted for.
    """

    folder: Path
    config: WrapConfig
    platform: Platform
    model: CostModel
    policies: tuple[Policy, ...]
    adapters: Mapping[str, str] = field(default_factory=dict)
    fleet: Fleet | None = None
    tokens: int = 64

    def run(self) -> AuditReport:
        """The report.

        Adapters that cannot be read are problems of it.

        Raises:
            WrapError: transformers cannot read the model, or it cannot be wrapped.
            CheckpointError: headers and config contradict each other.
            KernelUnavailableError: no kernel serves a linear on the device.
        """
        with ExitStack() as undo:
            hollow = HollowModel.of(self.folder, self.config, self.platform, undo)
            return self.of(hollow)

    def of(self, hollow: HollowModel) -> AuditReport:
        """The report of a model that was prepared already."""
        reader = SourceReader(self.config.source_limits)
        rank = self.config.tier_limits.width
        adapters = HollowAdapters(hollow.planner.registry, hollow.facts, rank, reader)
        problems = tuple(self._add_all(adapters))
        adapters.enter()
        audited = Audited(
            hollow.planner,
            adapters,
            hollow.found.unsited,
            model=str(self.folder),
            source="folder",
            checkpoint=hollow.resolved,
            assumptions=hollow.assumptions,
            problems=problems,
            fleet=self.fleet is not None,
            weights=None if self.fleet is None else self.fleet.weights,
        )
        return audit(audited, self.policies, self.model, tokens=self.tokens)

    def _add_all(self, adapters: HollowAdapters) -> Iterator[Problem]:
        yield from self._add(adapters, self.adapters.items(), by_shape=False)
        if self.fleet is None:
            return
        try:
            sources = list(self.fleet.sources())
        except OSError as error:
            yield Problem(
                part=f"folder of adapters {str(self.fleet.folder)!r}",
                reason=f"cannot be read ({error.strerror})",
                remedy="check the path and its permissions",
            )
            return
        printable = [(name, source) for name, source in sources if name.isprintable()]
        for name, _ in sources:
            if not name.isprintable():
                yield Problem(
                    part=f"adapter {name!a}",
                    reason="its folder's name holds characters that cannot be printed",
                    remedy="rename the folder",
                )
        yield from self._add(adapters, printable, by_shape=True)
        weights = self.fleet.weights
        if weights is not None and not any(weights.get(name) for name, _ in printable):
            yield Problem(
                part="traffic of the fleet",
                reason="names none of its adapters",
                remedy="name them as their folders (command line: --traffic)",
            )

    def _add(
        self, adapters: HollowAdapters, sources: Iterable[tuple[str, str]], *, by_shape: bool
    ) -> Iterator[Problem]:
        for name, source in sources:
            try:
                adapters.add(name, source, by_shape=by_shape)
            except AdapterError as error:
                yield problem_of(f"adapter '{name}'", error)


def problem_of(part: str, error: BranchlineError) -> Problem:
    """What a report says of a part that could not be audited."""
    return Problem(part=part, reason=f"{error.subject}: {error.reason}", remedy=error.remedy)
