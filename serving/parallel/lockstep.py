"""Loading, swapping and unloading adapters on all ranks of a replica, or on none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...adapters.manager import AdapterManager, AnySource
from ...adapters.version import AdapterInfo
from ...core.errors import BranchlineError, RankError
from .ranks import Ranks


@dataclass(frozen=True)
class _Outcome:
    """How a change went on one rank.

    Attributes:
        digest: of what it read.
        failure: why it failed; else empty.
        by_others: it failed only because another rank did not do the same.
    """

    digest: str = ""
    failure: str = ""
    by_others: bool = False


class LockstepAdapters:
    """The adapters of one rank, changed together with those of the others.

    Every rank calls the same methods with the same arguments in the same order, between forwards.
    A failure of one rank is known to all before any of them goes on, so that no batch names an
    adapter that a rank lacks: the others' forwards would wait for that rank in vain.

    Args:
        adapters: of this rank's served model.
        ranks: of the replica.
    """

    def __init__(self, adapters: AdapterManager, ranks: Ranks) -> None:
        self._adapters = adapters
        self._ranks = ranks

    def load(self, name: str, source: AnySource) -> AdapterInfo:
        """As `AdapterManager.load`, on all ranks or on none.

        Raises:
            AdapterError: of this rank.
            RankError: another rank failed, or read another content.
        """
        return self._changed(name, lambda: self._adapters.load(name, source), undoes_failed=False)

    def swap(self, name: str, source: AnySource) -> AdapterInfo:
        """As `AdapterManager.swap`, on all ranks.

        Where all ranks fail, the name points at what it did before.  Where only some do, or they
        read different contents, it is unloaded on all of them: what it was is gone on some.  (An
        adapter that takes the base's weights fails on all ranks if it does on one.)

        Raises:
            AdapterError: of this rank.
            RankError: another rank failed, or read another content.
        """
        return self._changed(name, lambda: self._adapters.swap(name, source), undoes_failed=True)

    def unload(self, name: str) -> None:
        """As `AdapterManager.unload`, without waiting, on all ranks.

        Raises:
            AdapterNotFoundError: the name is unknown here.
            RankError: it is unknown to another rank.
        """

        def unload() -> str:
            self._adapters.unload(name)
            return ""

        error, outcomes = self._told(unload)
        if error is not None:
            raise error
        _refuse_failures(name, outcomes)

    def _changed(
        self, name: str, change: Callable[[], AdapterInfo], *, undoes_failed: bool
    ) -> AdapterInfo:
        made: list[AdapterInfo] = []

        def digest() -> str:
            made.append(change())
            return made[0].digest

        error, outcomes = self._told(digest)
        succeeded = [outcome for outcome in outcomes if not outcome.failure]
        alike = len({outcome.digest for outcome in succeeded}) == 1
        if len(succeeded) == len(outcomes) and alike:
            return made[0]
        if made or (undoes_failed and succeeded and self._knows(name)):
            self._adapters.unload(name)
        if error is not None and not isinstance(error, RankError):
            raise error
        _refuse_failures(name, outcomes, error)
        digests = ", ".join(f"rank {i}: {o.digest[:12]}..." for i, o in enumerate(outcomes))
        raise RankError(
            f"adapter '{name}'",
            f"has another content on each rank ({digests})",
            "put the same files where all ranks read, and load it again",
        )

    def _knows(self, name: str) -> bool:
        return any(info.name == name for info in self._adapters.list())

    def _told(
        self, change: Callable[[], str]
    ) -> tuple[BranchlineError | None, tuple[_Outcome, ...]]:
        error: BranchlineError | None = None
        try:
            own = _Outcome(digest=change())
        except BranchlineError as caught:
            error = caught
            own = _Outcome(failure=str(caught), by_others=isinstance(caught, RankError))
        while True:
            told: tuple[Any, ...] = self._ranks.told_by_all(own)
            # A rank that still gathers the base's weights learns from this that another one has
            # failed, fails too, and tells its outcome in the next round.
            if all(isinstance(outcome, _Outcome) for outcome in told):
                return error, told


def _refuse_failures(
    name: str, outcomes: tuple[_Outcome, ...], own: BranchlineError | None = None
) -> None:
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.failure]
    # What made the others fail comes first.
    for rank, outcome in sorted(failed, key=lambda item: item[1].by_others):
        raise RankError(
            f"adapter '{name}'",
            f"rank {rank} failed: {outcome.failure}",
            "mend that; what was done on other ranks is undone",
        ) from own
