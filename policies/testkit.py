"""What every fusion policy must pass: `check_policy`.

```python
def test_mine():
    check_policy(MyPolicy())
```
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ..core.errors import BranchlineError, RawConsumerError
from ..core.platform import detect_platform
from ..core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from ..core.route import Route
from ..fusion.traffic import SiteTraffic
from ..linear.batch_class import BatchClass
from ..linear.registry import RawReader
from .base import Policy, RouteChoice, SiteState, allowed_routes
from .testkit_model import COLUMNS, CONSUMERS, SmallModel, random_targets, write_adapter

_SCHEMES = ("fp8-static", "fp8-dynamic")
_STATES = 200
_BATCHES = 6
_ADAPTERS = 4
_REMEDY = "see docs/policies.md for what a policy must hold"


class PolicyFailedError(BranchlineError, AssertionError):
    """A policy breaks what every policy must hold."""


def check_policy(policy: Policy, seeds: Sequence[int] = range(4)) -> None:
    """Check a policy's answers, and then what a small model computes under it, on this CPU.

    - **values**: two of the same options are equal and hash alike; the same state has the same
      answer, in whatever order states come; every answer has a reason.
    - **I1**: no route is chosen by which a live reader would not find what it reads.
    - **I2**: who reads a site raw is what the adapters of the batch say, through loads, unloads
      and hooks; when they are gone, the plan is what it was.
    - **I6**: the bytes are those of a model all of whose sites are unfused.
    - **I7**: rows without an adapter have the base's bytes, and no row depends on its neighbours'.

    Args:
        policy: to check, with the options that it is to be used with.
        seeds: of the random states, adapters and batches.

    Raises:
        PolicyFailedError: it breaks one of these; the message says where.
    """
    _check_value(policy)
    bound = policy.bound(detect_platform("cpu"))
    for seed in seeds:
        _check_answers(bound, random.Random(seed))
        for scheme in _SCHEMES:
            with tempfile.TemporaryDirectory() as folder:
                _Trial(policy, scheme, seed, Path(folder)).run()


def _refuse(policy: Policy, invariant: str, reason: str) -> None:
    name = getattr(policy, "name", type(policy).__qualname__)
    raise PolicyFailedError(f"policy {name!r}", f"breaks {invariant}: {reason}", _REMEDY)


# --- values -------------------------------------------------------------------------------------


def _check_value(policy: Policy) -> None:
    if not isinstance(policy, Policy):
        _refuse(policy, "values", "it is no instance of branchline.policies.Policy")
    if not isinstance(getattr(policy, "name", None), str):
        _refuse(policy, "values", "its class has no name")
    try:
        hash(policy)
    except TypeError as error:
        _refuse(policy, "values", f"it has no hash ({error}): make it frozen")
    # A value is told by what it holds: a copy of it shares its plans.
    twin = object.__new__(type(policy))
    for name, held in getattr(policy, "__dict__", {}).items():
        object.__setattr__(twin, name, held)
    for name in ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__"):
        if hasattr(policy, name):
            object.__setattr__(twin, name, getattr(policy, name))
    if twin != policy or hash(twin) != hash(policy):
        _refuse(policy, "values", "two of the same options are not equal")


def _check_answers(policy: Policy, choice: random.Random) -> None:
    states = [_random_state(policy, choice) for _ in range(_STATES)]
    first = [_answer(policy, state) for state in states]
    # Neither the order nor what was asked before may matter.
    order = choice.sample(range(_STATES), _STATES)
    for at in order:
        if _answer(policy, states[at]) != first[at]:
            _refuse(policy, "values", f"it answers otherwise the second time: {states[at]}")


def _answer(policy: Policy, state: SiteState) -> tuple[RouteChoice, ...]:
    choices = policy.choose(state)
    if not isinstance(choices, tuple) or not choices:
        _refuse(policy, "values", f"it answers {choices!r}, no tuple of choices, to {state}")
    for choice in choices:
        if not isinstance(choice, RouteChoice) or not choice.reason:
            _refuse(policy, "values", f"{choice!r} is no choice with a reason")
        if choice.route not in policy.routes:
            _refuse(policy, "values", f"it chose {choice.route}, which its `routes` do not have")
        if choice.route not in allowed_routes(state.raw_readers):
            readers = ", ".join(map(str, state.raw_readers)) or "no reader"
            _refuse(policy, "I1", f"it chose {choice.route} for a site with {readers}")
    return choices


def _random_state(policy: Policy, choice: random.Random) -> SiteState:
    readers = tuple(_random_reader(choice) for _ in range(choice.choice((0, 0, 1, 1, 2, 3))))
    key = choice.choice((FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN))
    columns = choice.choice((64, 576, 4096, 14336))
    batch = traffic = None
    if policy.by_batch:
        tokens = choice.choice((1, 3, 16, 200, 4096))
        adapted = choice.randint(1, tokens) if readers else 0
        batch = BatchClass.of(tokens, adapted, known=choice.random() < 0.5)
        width = sum(reader.shrink_rank or 0 for reader in readers)
        traffic = SiteTraffic(
            batch.tokens, columns, torch.bfloat16, key, batch.adapter_tokens, width
        )
    return SiteState(
        readers, bool(readers) or choice.random() < 0.5, choice.choice(("activation", "norm")),
        columns, torch.bfloat16, key, batch, traffic,
    )  # fmt: skip


def _random_reader(choice: random.Random) -> RawReader:
    kind = choice.choice(("branch", "branch", "branch", "branch", "hook", "unknown"))
    lora = kind == "branch" and choice.random() < 0.7
    changes = kind == "branch" and not lora and choice.random() < 0.5
    rank = choice.choice((1, 16, 64, 80)) if lora else None
    return RawReader(kind, f"{kind}{choice.randint(0, 9)}", "layer", rank, changes)


# --- a model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unfused(Policy):
    """What the others are compared with."""

    name: ClassVar[str] = "unfused"

    def choose(self, state: SiteState) -> tuple[RouteChoice, ...]:
        return (RouteChoice(Route.UNFUSED, "what others are compared with"),)


class _Trial:
    """One model under the policy beside one that fuses nothing, with the same adapters."""

    def __init__(self, policy: Policy, scheme: str, seed: int, folder: Path) -> None:
        self.policy = policy
        self.choice = random.Random(seed)
        self.models = (SmallModel(policy, scheme, seed), SmallModel(_Unfused(), scheme, seed))
        self.ours, self.plain = self.models
        self.targets: dict[str, dict[str, int]] = {}
        for number in range(_ADAPTERS):
            name, targets = f"a{number}", random_targets(self.choice)
            # DoRA would take the base's weights; plain LoRA and rsLoRA need none.
            settings = {"use_rslora": self.choice.random() < 0.5}
            self.targets[name] = targets
            write_adapter(folder / name, targets, seed + number, settings)
            for model in self.models:
                model.adapters.load(name, folder / name)
        self.generator = torch.Generator().manual_seed(seed)

    def run(self) -> None:
        before = self._routes(None)
        for names in self._batches():
            self._check_readers(names)
            self._check_bytes(names)
            self._check_packed(names)
            self._check_neighbours(names)
        self._check_hook()
        self._check_unload(before)

    def _batches(self) -> Iterator[list[str | None]]:
        known = [*self.targets, None]
        yield [None, None]
        for _ in range(_BATCHES):
            yield [self.choice.choice(known) for _ in range(self.choice.randint(1, 6))]

    def _input(self, *shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, COLUMNS, generator=self.generator)).bfloat16()

    def _routes(self, *names: str | None) -> tuple[Route, ...]:
        return self.ours.plan(names).routes

    def _readers(self, names: Sequence[str | None]) -> dict[str, set[str]]:
        """Of each site, the adapters that read it, from what was written into their folders."""
        live = {name for name in names if name is not None}
        return {
            site: {name for name in live if self.targets[name].keys() & set(consumers)}
            for site, consumers in CONSUMERS.items()
        }

    def _check_readers(self, names: Sequence[str | None]) -> None:
        plan = self.ours.plan(names)
        for site, readers in self._readers(names).items():
            planned = next(entry for entry in plan.sites if entry.site == site)
            if set(planned.blame) != readers:
                told = f"{site} is read by {sorted(readers)}, planned for {planned.blame}"
                _refuse(self.policy, "I2", f"{told} in a batch of {names}")
            if readers and planned.route == Route.FUSED:
                _refuse(self.policy, "I2", f"{site} is fused in a batch of {names}")

    def _check_bytes(self, names: Sequence[str | None]) -> None:
        x = self._input(len(names), 5)
        self._compare("I6", names, *(_run(model, names, x) for model in self.models))

    def _check_packed(self, names: Sequence[str | None]) -> None:
        tokens = [self.choice.choice((1, 1, 7, 40)) for _ in names]
        x = self._input(1, sum(tokens))
        ours, plain = (_run(model, names, x, tokens) for model in self.models)
        self._compare("I6", f"{names} with {tokens} tokens", ours, plain)

    def _check_neighbours(self, names: Sequence[str | None]) -> None:
        x = self._input(len(names), 3)
        out = _run(self.ours, names, x)
        base = _run(self.ours, [None] * len(names), x)
        rows = [row for row, name in enumerate(names) if name is None]
        self._compare("I7", f"base rows of {names}", out[rows], base[rows])
        kept = self.choice.randrange(len(names))
        others = [
            name if row == kept else self.choice.choice([*self.targets, None])
            for row, name in enumerate(names)
        ]
        changed = self._input(len(names), 3)
        changed[kept] = x[kept]
        beside = _run(self.ours, others, changed)
        self._compare("I7", f"row {kept} of {names} beside {others}", out[kept], beside[kept])

    def _check_hook(self) -> None:
        """A hook reads raw; whatever the policy chooses, it is handed a tensor, not codes."""
        seen: list[object] = []
        with ExitStack() as hooks:
            for model in self.models:
                layer = model.registry.layers["down"]
                handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
                hooks.callback(handle.remove)
            names = [*self.targets, None]
            x = self._input(len(names), 2)
            self._compare("I6", "a hook", *(_run(model, names, x) for model in self.models))
        if len(seen) != len(self.models) or not all(isinstance(s, torch.Tensor) for s in seen):
            _refuse(self.policy, "I1", f"a hook was handed {[type(s).__name__ for s in seen]}")

    def _check_unload(self, before: tuple[Route, ...]) -> None:
        for name in self.targets:
            for model in self.models:
                model.adapters.unload(name)
        after = self._routes(None)
        if after != before:
            _refuse(self.policy, "I2", f"without adapters it planned {before}, and now {after}")

    def _compare(
        self, invariant: str, batch: object, ours: torch.Tensor, plain: torch.Tensor
    ) -> None:
        differing = int((ours.view(torch.uint8) != plain.view(torch.uint8)).sum())
        if differing:
            _refuse(self.policy, invariant, f"{differing} bytes differ, in a batch of {batch}")


def _run(
    model: SmallModel,
    names: Sequence[str | None],
    x: torch.Tensor,
    tokens: Sequence[int] | None = None,
) -> torch.Tensor:
    try:
        with torch.no_grad(), model.adapters.rows(names, tokens=tokens):
            return model.run(x)
    except RawConsumerError as error:
        subject = f"policy {model.planner.policy.name!r}"
        raise PolicyFailedError(subject, f"breaks I1: {error}", _REMEDY) from error
