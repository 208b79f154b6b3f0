"""From a policy, the model's linears and the tensors' headers to one scheme a linear."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...core.errors import CheckpointError
from ...core.scheme import LinearScheme
from ..contract import InputContract
from ..quantized_weight import QuantizedWeight
from .assemble import assemble
from .document import short
from .layer import Layer, Parts, TensorHeader, settle
from .matching import Entry, LinearNames
from .policy import Group, Policy, Unserved, listed

#: Output heads, by the last part of their names: producers leave them alone without saying so.
HEADS = ("lm_head", "embed_out")
_TENSORS_OR_FILES = "mend the metadata, or use the tensors that belong to it"

__all__ = ["ResolvedQuant", "TensorHeader", "resolve"]


@dataclass(frozen=True)
class ResolvedQuant:
    """What each linear of a model is.

    Attributes:
        schemes: the quantised linears' schemes, by full name.
        unquantized: the others, in the model's order.
        unmatched: entries of the ignore list that name no linear.
        decisions: which value was taken from where, for people.
        layers: where the tensors of the quantised linears lie.
    """

    schemes: Mapping[str, LinearScheme]
    unquantized: tuple[str, ...]
    unmatched: tuple[str, ...]
    decisions: tuple[str, ...]
    layers: Mapping[str, Layer]

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        """Full names of a quantised linear's tensors, its bias excluded.

        Without headers, the names that are usual for the format.

        Raises:
            KeyError: the linear is not quantised.
        """
        return self.layers[linear].tensor_names()

    def assemble(
        self, linear: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
    ) -> tuple[QuantizedWeight, InputContract]:
        """The weight and the input's contract of a quantised linear.

        Args:
            linear: its full name.
            tensors: those of `tensor_names`, by full name; others are not looked at.
            shape: (N, K) of the weight.

        Raises:
            CheckpointError: a tensor that is missing, or codes of another dtype or shape.
            ScaleError: a scale that is unusable or of the wrong shape, or codes that are NaN.
            KeyError: the linear is not quantised.
        """
        return assemble(self.layers[linear], tensors, shape)


class _Matches(NamedTuple):
    groups: Mapping[str, Group]
    ignored: frozenset[str]
    unmatched: tuple[str, ...]
    idle: tuple[str, ...]


def resolve(
    policy: Policy,
    linears: Sequence[str],
    headers: Mapping[str, TensorHeader] | None,
    modules: Mapping[str, Sequence[str]],
) -> ResolvedQuant:
    """What each linear is; see `CheckpointQuant.resolve`.

    Raises:
        CheckpointError: as there.
    """
    parts = None if headers is None else Parts.of(linears, headers)
    matches = _match(policy, linears, modules)
    notes = [*policy.notes, *matches.idle]
    if parts is not None and parts.all_float(linears, HEADS):
        said = f"{policy.source} says {policy.method}, but every weight is float: not quantised"
        return _unquantized(linears, matches.unmatched, [*notes, said])
    if not policy.rules and parts is None:
        said = f"{policy.source} quantises no linear"
        return _unquantized(linears, matches.unmatched, [*notes, said])
    layers: dict[str, Layer] = {}
    unspoken: list[str] = []
    for name in linears:
        if _unspoken(policy, matches, name, parts):
            unspoken.append(name)
            continue
        layer = _decide(policy, matches, name, parts, notes)
        if layer is not None:
            layers[name] = layer
    notes += _left(policy, unspoken, parts)
    if not layers:
        raise _nothing_left(policy, linears, matches)
    schemes = {name: layer.scheme for name, layer in layers.items()}
    notes += [f"{policy.source} gives {scheme}" for scheme in listed(map(str, schemes.values()))]
    return ResolvedQuant(
        MappingProxyType(schemes),
        tuple(name for name in linears if name not in layers),
        matches.unmatched,
        listed(notes),
        MappingProxyType(layers),
    )


def _unquantized(
    linears: Sequence[str], unmatched: tuple[str, ...], notes: Sequence[str]
) -> ResolvedQuant:
    return ResolvedQuant({}, tuple(linears), unmatched, listed(notes), {})


def _unspoken(policy: Policy, matches: _Matches, name: str, parts: Parts | None) -> bool:
    """Whether a linear stays unquantised although no list says so."""
    if name not in matches.groups or name in matches.ignored:
        return False
    silent = policy.silent_ignore and policy.ignore is None
    head = name.rpartition(".")[2] in HEADS
    if parts is None:
        return silent and head
    return (silent or head) and (parts.float_weight(name) or parts.tied(name, head))


def _left(policy: Policy, names: Sequence[str], parts: Parts | None) -> list[str]:
    if not names:
        return []
    said = f"{policy.source} does not name {len(names)} in {policy.ignore_field} ({names[0]}"
    why = "output heads stay unquantised" if parts is None else "their weights are float"
    return [f"{said}{', ...' if len(names) > 1 else ''}): {why}"]


def _decide(
    policy: Policy, matches: _Matches, name: str, parts: Parts | None, notes: list[str]
) -> Layer | None:
    group = matches.groups.get(name)
    claimed = group is not None and name not in matches.ignored
    if not claimed or group is None or group.scheme is None:
        if parts is not None and parts.coded(name):
            raise _contradicted(policy, group, name, name in matches.ignored, parts)
        return None
    if isinstance(group.scheme, Unserved):
        reason = f"{group.scheme.what} ({group.where}), is not served; {name} has it"
        raise CheckpointError(policy.source, reason, group.scheme.remedy)
    if parts is not None and parts.float_weight(name):
        reason = (
            f"{policy.source} ({group.where}) says {group.scheme}, but its weight is "
            f"{parts.weight_dtype(name)}{_stray(policy, matches)}"
        )
        raise CheckpointError(name, reason, f"name it in {policy.ignore_field}")
    return settle(policy, group, group.scheme, name, parts, notes)


def _contradicted(
    policy: Policy, group: Group | None, name: str, ignored: bool, parts: Parts
) -> CheckpointError:
    where = policy.ignore_field if ignored else group.where if group else "no group"
    said = f"{policy.source} leaves it unquantised ({where})"
    reason = f"{said}, but its weight is {parts.weight_dtype(name)}"
    return CheckpointError(name, reason, _TENSORS_OR_FILES)


def _stray(policy: Policy, matches: _Matches) -> str:
    if not matches.unmatched:
        return ""
    return f", and {short(matches.unmatched[0])} in {policy.ignore_field} names no linear"


def _nothing_left(policy: Policy, linears: Sequence[str], matches: _Matches) -> CheckpointError:
    if matches.groups.keys() & matches.ignored:
        return CheckpointError(
            policy.source,
            f"the ignore list ({policy.ignore_field}) matches every linear that a group names "
            f"({len(matches.ignored)}), nothing is left quantised",
            "mend the list, or remove the metadata of an unquantised checkpoint",
        )
    return CheckpointError(
        policy.source,
        f"names none of the model's {len(linears)} linears as quantised",
        "use the metadata of this model, with its names",
    )


# --- names ---------------------------------------------------------------------------------------


def _match(
    policy: Policy, linears: Sequence[str], modules: Mapping[str, Sequence[str]]
) -> _Matches:
    names = LinearNames(linears)
    others = LinearNames(modules)
    groups: dict[str, Group] = {}
    idle = []
    for rule in policy.rules:
        found: Sequence[str] = linears
        if rule.target is not None:
            found = _matching(names, policy, rule.group.where, rule.target)
        if not found:
            idle.append(f"{rule.group.where}: {short(rule.target)} names no linear")
        for name in found:
            groups.setdefault(name, rule.group)
    ignored: set[str] = set()
    unmatched = []
    for entry in listed(policy.ignore or ()):
        hit = _matching(names, policy, policy.ignore_field, entry)
        ignored.update(hit)
        named = _matching(others, policy, policy.ignore_field, entry) if modules else ()
        if policy.covers_below:
            ignored.update(linear for module in named for linear in modules[module])
        if not hit and not named:
            unmatched.append(entry)
    return _Matches(groups, frozenset(ignored), tuple(unmatched), tuple(idle))


def _matching(names: LinearNames, policy: Policy, field: str, text: str) -> Sequence[str]:
    try:
        entry: Entry = policy.dialect(text)
        return names.matching(entry)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            policy.source,
            f"{field} holds {short(text)}, which is no pattern of {policy.method}: {error}",
            "mend the entry",
        ) from error
