"""All checks of an adapter against a base model, from names, shapes and dtypes alone.

Reading a folder and taking an adapter out of a live `PeftModel` go through `plan_load`.  Every
check adds to one list of findings, so that one attempt tells everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND, SEQ_CLS_HEAD_NAMES

from ..core.errors import AdapterCapacityError, AdapterUnsupportedError
from .base import BaseFacts, Target, TargetExperts, TargetLayer
from .config_file import ParsedConfig
from .expert_names import ExpertNames, KnownNames, Placed, names_in_config
from .findings import Finding, damaged, listing, mismatch, unsupported
from .identity import compare_bases
from .names import NameParser, NameRule, PartName, choose_rule, common_prefix, features_of
from .patterns import DottedEnds
from .saved import SavedParts, TokenRows, find_saved
from .selection import ModuleSelection
from .shapes import check_dtypes, check_shapes, check_sizes
from .tensor_file import TensorHeader
from .tuners.base import Module, TunerType
from .tuners.config import TunerConfig


@dataclass(frozen=True)
class PlannedModule:
    """What one module of the base gets from the file.

    Args:
        module: the module, with the headers of the type's own tensors.
        whole: "weight" and "bias" of a module saved whole, to the names of their tensors.
        copies: the same of a copy of the base's own.
        tokens: trained rows.
    """

    module: Module
    whole: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    tokens: TokenRows | None = None

    @property
    def target(self) -> Target:
        """The base model's module."""
        return self.module.target


@dataclass(frozen=True)
class LoadPlan:
    """What to read, and how to lower it.

    Args:
        tuner: the PEFT type.
        config: its served keys, with PEFT's defaults for this model.
        modules: by their names in the base model.
        shared: tensors that all modules share, by part, to their names in the file.
        notes: for the listing.
        max_rank: the rank the slots were sized for.
    """

    tuner: TunerType[Any]
    config: TunerConfig
    modules: Mapping[str, PlannedModule]
    shared: Mapping[str, str]
    notes: tuple[str, ...]
    max_rank: int

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """What it takes of the file, each once."""
        names = list(self.shared.values())
        for planned in self.modules.values():
            names += [header.name for header in planned.module.headers.values()]
            names += [*planned.whole.values(), *planned.copies.values()]
            names += [] if planned.tokens is None else [planned.tokens.tensor]
        return tuple(dict.fromkeys(names))


@dataclass
class _Check:
    """The state of one check; lives for one call of `plan_load`."""

    tuner: TunerType[Any]
    config: TunerConfig
    base: BaseFacts
    headers: Mapping[str, TensorHeader]
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    rule: NameRule = field(default_factory=NameRule)

    @cached_property
    def allowed(self) -> dict[str, Target]:
        """The modules that the type may sit on."""
        targets = self.base.targets
        return {name: t for name, t in targets.items() if isinstance(t, self.tuner.targets)}

    @cached_property
    def known(self) -> KnownNames:
        """What their tensors may be called."""
        return KnownNames(self.allowed)

    @cached_property
    def experts(self) -> ExpertNames:
        """The experts among them, once `rule` is chosen."""
        parameters = getattr(self.config, "target_parameters", None)
        return ExpertNames(self.known, self.rule, parameters)

    def place(self, part: PartName) -> Placed | None:
        """Where a tensor of a module belongs; None where the type sits on no such module."""
        name = self.rule.to_base(part.module)
        if name in self.allowed and not isinstance(self.allowed[name], TargetExperts):
            return Placed(name, part.part, self.rule.to_adapter(name))
        return self.experts.place(part)


def plan_load(
    parsed: ParsedConfig,
    headers: Sequence[TensorHeader],
    base: BaseFacts,
    *,
    max_rank: int,
) -> tuple[LoadPlan, list[Finding]]:
    """Check an adapter and say what to read.

    Args:
        parsed: its config; tensors of keys that are refused already are not reported again.
        headers: all tensors of its file.
        base: the model it is to be loaded on.
        max_rank: the rank the slots were sized for.

    Returns:
        The plan and the findings, those of the config included. The plan may be used only if there
        are no findings.
    """
    tuner = parsed.tuner
    beyond = check_sizes(headers, base)
    if beyond:
        plan = LoadPlan(tuner, parsed.config, {}, {}, (), max_rank)
        return plan, [*parsed.findings, *beyond]
    config, unresolved = tuner.resolved(parsed.config, base)
    by_name = {header.name: header for header in headers}
    check = _Check(tuner, config, base, by_name, [*parsed.findings, *unresolved])
    try:
        plan = _checked(check, parsed, max_rank, resolved=not unresolved)
    except AdapterUnsupportedError as error:
        # What ended the check: a pattern that would have taken too long.
        check.findings.append(unsupported(f"{error.subject}: {error.reason}", error.remedy))
        plan = LoadPlan(tuner, config, {}, {}, (), max_rank)
    return plan, check.findings


def _checked(check: _Check, parsed: ParsedConfig, max_rank: int, *, resolved: bool) -> LoadPlan:
    tuner, config, base, headers = check.tuner, check.config, check.base, check.headers
    _check_base(check, parsed)
    _check_task(check)
    parts, shared, others = _split(check)
    check.rule = choose_rule({part.module for part in parts}, check.known)
    findings, notes = check.experts.check_parameters(base)
    check.findings += findings
    check.notes += notes
    modules = _group(check, parts) if resolved else {}
    saved = find_saved(tuner, config, base, check.rule, headers, others, modules)
    check.findings += saved.findings
    check.notes += saved.notes
    _check_others(check, saved.leftover, parsed.refused)
    if parts and not modules and resolved:
        _nothing_matches(check, parts)
    elif modules:
        _check_modules(check, modules, shared, max_rank)
    elif not headers:
        check.findings.append(damaged("the file holds no tensor"))
    elif not saved.modules and not others:
        check.findings.append(damaged("the file holds no tensor of a module"))
    check_dtypes(headers.values(), check.findings)
    _check_token_capacity(check, saved, max_rank)
    planned = _planned(check, modules, saved)
    return LoadPlan(tuner, config, planned, shared, tuple(check.notes), max_rank)


def _planned(
    check: _Check, modules: Mapping[str, Module], saved: SavedParts
) -> dict[str, PlannedModule]:
    targets = check.base.targets
    names = [name for name in targets if name in modules or name in saved.modules]
    return {
        name: PlannedModule(
            modules.get(name) or Module(targets[name], check.rule.to_adapter(name)),
            saved.whole.get(name, {}),
            saved.copies.get(name, {}),
            saved.tokens.get(name),
        )
        for name in names
    }


def _check_base(check: _Check, parsed: ParsedConfig) -> None:
    findings, notes = compare_bases(parsed.base_model, check.base.identity)
    check.findings += findings
    check.notes += notes


def _check_task(check: _Check) -> None:
    task = check.config.task_type
    if task is not None and task != check.base.task:
        text = f"the adapter is for the task {task} but the model's is {check.base.task}"
        check.findings.append(mismatch(text, f"load it on a model for {task}"))


def _split(check: _Check) -> tuple[list[PartName], dict[str, str], list[str]]:
    """The tensors of modules, the shared ones by part, and all others."""
    parser = NameParser(check.tuner.parts(check.config), check.tuner.shared(check.config))
    parts, shared, others = [], {}, []
    adapters: set[str | None] = set()
    for name in check.headers:
        part = parser.parse(name)
        if part is None:
            others.append(name)
            continue
        adapters.add(part.adapter)
        if part.module:
            parts.append(part)
        elif part.part in shared:
            text = f"two tensors {part.part}: {shared[part.part]!r} and {name!r}"
            check.findings.append(damaged(text))
        else:
            shared[part.part] = name
    if len(adapters) > 1:
        found = listing(sorted(name or "(none)" for name in adapters))
        check.findings.append(damaged(f"tensors of more than one adapter in the file: {found}"))
    elif adapters and (only := adapters.pop()) is not None:
        check.notes.append(f"tensor names carry the adapter name {only!r}")
    if any(not part.prefixed for part in parts):
        check.notes.append("tensor names without PEFT's prefix 'base_model.model.'")
    return parts, shared, others


def _check_others(check: _Check, others: Sequence[str], explained: Collection[str]) -> None:
    for feature, (key, tensors) in features_of(others, explained).items():
        unset = f" although the config does not set {key}" if key else ""
        text = f"tensors that would not be used: {feature}{unset}: {listing(tensors)}"
        # Not "remove them": without them the rest would compute something else.
        remedy = "use an adapter that was trained without this feature"
        check.findings.append(unsupported(text, remedy))


def _nothing_matches(check: _Check, parts: Sequence[PartName]) -> None:
    modules = {part.module for part in parts}
    prefix = common_prefix(modules)
    text = f"no tensor names a {check.tuner.kinds} of this model: "
    text += f"all lie below {prefix!r}" if prefix else f"they name {listing(sorted(modules))}"
    check.findings.append(mismatch(text))


def _group(check: _Check, parts: Sequence[PartName]) -> dict[str, Module]:
    """Modules with their headers; what names none that the type may sit on becomes a finding."""
    allowed = check.allowed
    found: dict[str, dict[str, TensorHeader]] = {}
    aliases, strangers = {}, []
    for part in parts:
        placed = check.place(part)
        if placed is None:
            strangers.append(part)
            continue
        name, own = placed.name, placed.part
        headers = found.setdefault(name, {})
        aliases[name] = placed.alias
        if own in headers:
            text = f"layer {name!r} has two tensors {own}: {headers[own].name!r} and "
            check.findings.append(damaged(text + repr(part.tensor)))
        headers[own] = check.headers[part.tensor]
    if found:
        _check_strangers(check, strangers)
        if check.rule.note is not None:
            check.notes.append(check.rule.note)
    return {name: Module(allowed[name], aliases[name], headers) for name, headers in found.items()}


def _check_strangers(check: _Check, strangers: Sequence[PartName]) -> None:
    modules = set(check.base.modules)
    for in_model, why in (
        (True, f"they name modules that are no {check.tuner.kinds}"),
        (False, "they name no module of the model"),
    ):
        names = [
            part.tensor
            for part in strangers
            if (check.rule.to_base(part.module) in modules) is in_model
        ]
        if names:
            text = f"tensors that would not be used, because {why}: {listing(names)}"
            named = (check.rule.to_base(part.module) for part in strangers)
            remedy = _by_parameter(check, named) if in_model else ""
            check.findings.append(mismatch(text, remedy) if remedy else mismatch(text))


def _by_parameter(check: _Check, modules: Iterable[str]) -> str:
    """How a config names the routers and experts among `modules`; empty where there are none."""
    targets = [t for name in dict.fromkeys(modules) for t in check.known.by_module.get(name, ())]
    if not targets:
        return ""
    # Routers were linears once, and a linear's tensors are those of a parameter of one expert.
    names = listing(check.experts.alias(target) for target in targets)
    return (
        "take these modules out of target_modules in adapter_config.json and name their "
        f"parameters in target_parameters: {names}"
    )


def _check_modules(
    check: _Check, modules: Mapping[str, Module], shared: Mapping[str, str], max_rank: int
) -> None:
    targets = _select_targets(check, modules)
    _compare_targets(check, targets, modules)
    _check_patterns(check, targets, modules)
    for name, module in modules.items():
        if module.target.refusal is not None:
            text = f"layer {name!r} cannot take a branch: {module.target.refusal}"
            check.findings.append(unsupported(text, "train the adapter without this layer"))
    check_shapes(check.tuner, check.config, modules, shared, check.headers, check.findings)
    ranks = [check.tuner.rank(check.config, module) for module in modules.values()]
    allowed = check.allowed
    for name in targets - modules.keys():
        bare = Module(allowed[name], check.rule.to_adapter(name))
        ranks.append(check.tuner.rank(check.config, bare))
    _check_capacity(check, max(ranks), max_rank)


def _select_targets(check: _Check, found: Mapping[str, Module]) -> set[str]:
    """The modules that PEFT would give an adapter of this config; others become findings."""
    targets = _target_modules(check)
    if targets is None:
        return set()
    config = check.config
    selection = ModuleSelection(
        targets,
        exclude=config.exclude_modules,
        layers=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
        modules_to_save=config.modules_to_save,
    )

    def selected(name: str) -> bool:
        return selection.selects(check.rule.to_adapter(name))

    allowed = check.allowed
    linears = (name for name, t in allowed.items() if not isinstance(t, TargetExperts))
    modules = {name for name in linears if selected(name)}
    modules |= check.experts.targeted(found, selection, check.findings)
    others = [n for n in check.base.modules if n and n not in allowed and selected(n)]
    if others:
        kinds = check.tuner.kinds
        text = f"target_modules also selects what is no {kinds}: {listing(others)}"
        remedy = _by_parameter(check, others) or f"train the adapter on {kinds}s only"
        check.findings.append(unsupported(text, remedy))
    if isinstance(config.target_modules, list):
        _note_unmatched(check, config.target_modules, found)
    return modules


def _note_unmatched(check: _Check, entries: Sequence[str], found: Mapping[str, Module]) -> None:
    # PEFT accepts these, and lists made for several models are common. The tensors are compared
    # with what is selected, so nothing can be missed by it.
    names = [check.rule.to_adapter(name) for name in check.allowed]
    names += [name for module in found.values() for name in names_in_config(module)]
    left = DottedEnds(entries).unmatched(names)
    unmatched = [entry for entry in entries if entry in left]
    if unmatched:
        check.notes.append(f"target_modules entries that name no layer: {listing(unmatched)}")


def _target_modules(check: _Check) -> list[str] | str | None:
    """`target_modules` with "all-linear" and null resolved as PEFT does it."""
    targets = check.config.target_modules
    if targets is None:
        default = check.tuner.default_targets(check.base)
        if default is None and check.experts.parameters:
            # PEFT then targets parameters alone.
            default = ()
        if default is None:
            kind = check.base.model_type
            text = f"target_modules is null and PEFT has no default for models of type {kind!r}"
            check.findings.append(unsupported(text, "name the targets in adapter_config.json"))
            return None
        targets = default if isinstance(default, str) else list(default)
    if isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND:
        head = _head(check)
        return [check.rule.to_adapter(name) for name in check.base.layers if name != head]
    return targets


def _head(check: _Check) -> str | None:
    """What PEFT leaves out of "all-linear": the output embedding, else a classifier's head."""
    if check.base.output_embedding is not None or check.config.task_type != "SEQ_CLS":
        return check.base.output_embedding
    modules = set(check.base.modules)
    return next((name for name in SEQ_CLS_HEAD_NAMES if name in modules), None)


def _compare_targets(check: _Check, targets: set[str], layers: Collection[str]) -> None:
    missing = [name for name in check.base.targets if name in targets and name not in layers]
    if missing:
        text = f"the config targets layers for which the file has no tensors: {listing(missing)}"
        check.findings.append(mismatch(text))
    extra = [name for name in layers if name not in targets]
    if extra:
        text = f"the file has tensors for layers that the config does not target: {listing(extra)}"
        check.findings.append(mismatch(text))


def _check_patterns(check: _Check, targets: Collection[str], modules: Mapping[str, Module]) -> None:
    names = [
        known
        for name in targets
        for known in (
            names_in_config(modules[name]) if name in modules else [check.rule.to_adapter(name)]
        )
    ]
    for key, patterns in check.config.patterns.items():
        # Of other modules too, so that nothing is left to be matched where shapes are checked.
        for module in modules.values():
            patterns.key_of(module.alias)
        unmatched = patterns.unmatched(names)
        explained = {patterns.key_of(name) for name in names}.union(unmatched)
        if unmatched:
            text = f"{key} entries that match no target: {listing(unmatched)}"
            check.findings.append(mismatch(text, f"correct or remove these entries of {key}"))
        hidden = [entry for entry in patterns if entry not in explained]
        if hidden:
            note = f"{key} entries hidden by others before them, as in PEFT: {listing(hidden)}"
            check.notes.append(note)


def _check_token_capacity(check: _Check, saved: SavedParts, max_rank: int) -> None:
    # On a linear the trained rows are a product of as many ranks.
    counts = [
        len(rows.ids)
        for name, rows in saved.tokens.items()
        if isinstance(check.base.targets.get(name), TargetLayer)
    ]
    _check_capacity(check, max(counts, default=0), max_rank)


def _check_capacity(check: _Check, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        text = f"adapter has rank {rank} but slots were sized for {max_rank}"
        remedy = f"wrap with max_lora_rank={rank} (command line: --max-lora-rank {rank})"
        check.findings.append(Finding(AdapterCapacityError, text, remedy))
