"""Which projection of which experts a tensor of a file belongs to.

PEFT wraps the module that holds a targeted parameter; a second parameter of the same module is
wrapped around that, so that a tensor's name tells its depth and not its parameter.  PEFT goes
through a module's parameters in the order in which they are registered, whatever the order of
`target_parameters`: the last of them is outermost (`BaseTuner._inject_parameters`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from .base import BaseFacts, Target, TargetExperts
from .findings import Finding, listing, mismatch, unsupported
from .lowering.experts import PARAMETER, STACKED
from .names import NameRule, PartName
from .patterns import DottedEnds
from .selection import ModuleSelection
from .tuners.base import Module

_NESTED = ".base_layer"
_APART = re.compile(r"(?P<experts>.+)\.(?P<number>0|[1-9]\d{0,8})\.(?P<linear>[^.]+)", re.DOTALL)
_HALVES = ("lora_A", "lora_B")
# Targeted by these, every module that has one would be wrapped.
_ANY_MODULE = ("weight", "bias")


@dataclass(frozen=True)
class Placed:
    """Where one tensor of a file belongs.

    Attributes:
        name: of the target in the base model.
        part: of the module.
        alias: the adapter's name of the module.
    """

    name: str
    part: str
    alias: str


class KnownNames:
    """The names that tensors of an adapter may be called by, as far as the base model tells.

    Args:
        allowed: the modules that the type may sit on.
    """

    def __init__(self, allowed: Mapping[str, Target]) -> None:
        self._allowed = allowed
        self.by_module: dict[str, list[TargetExperts]] = {}
        self.by_path: dict[str, list[TargetExperts]] = {}
        for target in allowed.values():
            if isinstance(target, TargetExperts):
                self.by_module.setdefault(target.module, []).append(target)
                for path in {target.module, target.earlier or target.module}:
                    self.by_path.setdefault(path, []).append(target)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return name in self._allowed or bool(self.nested(name)[0]) or self.apart(name) is not None

    def nested(self, name: str) -> tuple[list[TargetExperts], int]:
        """The projections of the experts below a module's wrappers, and how many are around it."""
        depth = 0
        while name.endswith(_NESTED):
            name, depth = name.removesuffix(_NESTED), depth + 1
        return self.by_module.get(name, []), depth

    def apart(self, name: str) -> tuple[TargetExperts, str, str] | None:
        """The projection, the experts' path and the rest of a linear of one expert."""
        match = _APART.fullmatch(name)
        if match is None:
            return None
        for target in self.by_path.get(match["experts"], ()):
            if match["linear"] in target.linears and int(match["number"]) < target.experts:
                return target, match["experts"], f"{match['number']}.{match['linear']}"
        return None


class ExpertNames:
    """The experts of one base model as one adapter names them.

    Args:
        known: of the base model.
        rule: how the adapter's names differ from the model's.
        parameters: the config's `target_parameters`.
    """

    def __init__(self, known: KnownNames, rule: NameRule, parameters: list[str] | None) -> None:
        self._known = known
        self._rule = rule
        self.parameters = tuple(parameters or ())
        self._ends = DottedEnds(self.parameters)

    def place(self, part: PartName) -> Placed | None:
        """Where a tensor belongs that is named after experts; None for any other tensor."""
        if part.part not in _HALVES:
            return None
        half, name = _HALVES.index(part.part), self._rule.to_base(part.module)
        targets, depth = self._known.nested(name)
        if targets:
            wrapped = [target for target in targets if self.selects(target)]
            if depth >= len(wrapped):
                return None
            target = wrapped[-1 - depth]
            return Placed(target.name, PARAMETER[half], self.alias(target))
        apart = self._known.apart(name)
        if apart is not None:
            target, _, rest = apart
            return Placed(target.name, f"{rest}.{part.part}", part.module.removesuffix(f".{rest}"))
        for target in self._known.by_module.get(name.rpartition(".")[0], ()):
            if target.name == name:
                return Placed(name, STACKED[half], self.alias(target))
        return None

    def selects(self, target: TargetExperts) -> bool:
        """Whether `target_parameters` names a projection, by its full name or the end of it."""
        return self._ends.matches(self.alias(target))

    def alias(self, target: TargetExperts) -> str:
        """The adapter's name of a projection."""
        return self._rule.to_adapter(target.name)

    @cached_property
    def _targets(self) -> tuple[TargetExperts, ...]:
        return tuple(target for group in self._known.by_module.values() for target in group)

    def check_parameters(self, base: BaseFacts) -> tuple[list[Finding], list[str]]:
        """Findings and notes about entries of `target_parameters` that name no projection."""
        left = self._ends.unmatched(self.alias(target) for target in self._targets)
        unmatched = [e for e in self.parameters if e in left or e in _ANY_MODULE]
        owners = DottedEnds(entry.rpartition(".")[0] for entry in unmatched if "." in entry)
        held = [name for name in base.modules if owners.matches(self._rule.to_adapter(name))]
        own = {
            entry
            for entry in unmatched
            if entry in _ANY_MODULE
            or DottedEnds([entry.rpartition(".")[0]]).unmatched(held) == frozenset()
        }
        findings, notes = [], []
        if own:
            shown = listing(entry for entry in unmatched if entry in own)
            text = (
                f"target_parameters names {shown}, and branches on parameters are served for the "
                "projections of experts and for their routers' weights alone"
            )
            findings.append(unsupported(text, "train the adapter on linears and experts"))
        if others := [entry for entry in unmatched if entry not in own]:
            notes.append(f"target_parameters entries that name no parameter: {listing(others)}")
        return findings, notes

    # --- what the config selects ----------------------------------------------------------------

    def targeted(
        self, modules: Mapping[str, Module], selection: ModuleSelection, findings: list[Finding]
    ) -> set[str]:
        """The projections that the config gives an adapter.

        Args:
            modules: what the file has tensors for.
            selection: by the config's other keys, which may name each expert's linears.
            findings: gets what the two do not agree on.
        """
        found = set()
        apart = [m for m in modules.values() if is_apart(m)]
        for target in self._targets:
            own = modules.get(target.name)
            if self.selects(target) or (own is not None and not is_apart(own)):
                # Stacked halves are named after the projection, as if it were a module.
                if self.selects(target) or selection.selects(self.alias(target)):
                    found.add(target.name)
            elif apart and target.linears:
                path = own.alias if own is not None else self._path(target, apart[0])
                if self._compare(target, path, own, selection, findings):
                    found.add(target.name)
        return found

    def _path(self, target: TargetExperts, like: Module) -> str:
        assert isinstance(like.target, TargetExperts)
        is_now = self._rule.to_base(like.alias) == like.target.module
        return self._rule.to_adapter(target.module if is_now else target.earlier)

    def _compare(
        self,
        target: TargetExperts,
        path: str,
        own: Module | None,
        selection: ModuleSelection,
        findings: list[Finding],
    ) -> bool:
        """Compare the linears of a projection's experts; whether any of them is selected."""
        chosen = {
            (number, linear)
            for number in range(target.experts)
            for linear in target.linears
            if selection.selects(f"{path}.{number}.{linear}")
        }
        if own is None or not chosen:
            return bool(chosen)
        there = {(number, linear) for number, linear, _ in apart_parts(own)}
        for pairs, what in (
            (chosen - there, "the config targets experts for which the file has no tensors"),
            (there - chosen, "the file has tensors for experts that the config does not target"),
        ):
            if pairs:
                names = [f"{path}.{number}.{linear}" for number, linear in sorted(pairs)]
                findings.append(mismatch(f"{what}: {listing(names)}"))
        return True


def is_apart(module: Module) -> bool:
    """Whether an adapter has tensors for each expert of a projection by itself."""
    return isinstance(module.target, TargetExperts) and any(
        part[0].isdigit() for part in module.headers
    )


def apart_parts(module: Module) -> Iterator[tuple[int, str, str]]:
    """Expert, linear and half of the tensors of a module that `is_apart`."""
    for part in module.headers:
        if part[0].isdigit():
            number, linear, half = part.split(".")
            yield int(number), linear, half


def names_in_config(module: Module) -> list[str]:
    """What a config's patterns may call a module: its alias, or each linear of its experts."""
    if not is_apart(module):
        return [module.alias]
    linears = {(number, linear) for number, linear, _ in apart_parts(module)}
    return [f"{module.alias}.{number}.{linear}" for number, linear in sorted(linears)]
