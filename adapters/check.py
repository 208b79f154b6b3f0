"""All checks of a LoRA adapter against a base model, from names, shapes and dtypes alone.

Reading a folder and taking an adapter out of a live `PeftModel` go through `plan_load`. Every check
adds to one list of findings, so that one attempt tells everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import (
    INCLUDE_LINEAR_LAYERS_SHORTHAND,
    SEQ_CLS_HEAD_NAMES,
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
)
from peft.utils.other import get_pattern_key

from ..core.errors import AdapterCapacityError
from .base import BaseFacts, TargetLayer
from .findings import Finding, damaged, listing, mismatch, unsupported
from .lora_config import LoraConfigFile
from .names import (
    HalfName,
    NameRule,
    choose_rule,
    common_prefix,
    features_of,
    parse_half,
)
from .weights import lora_scaling

# safetensors' names of the dtypes that a branch can be computed in.
SERVED_DTYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True)
class TensorHeader:
    """What a file says about a tensor before its bytes.

    Args:
        name: the name in the file.
        dtype: safetensors' name of the dtype ("F32", "BF16", "F8_E4M3").
        shape: the sizes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PlannedLayer:
    """Where one layer's weights lie in the file, and its scaling."""

    a: str
    b: str
    scaling: float


@dataclass(frozen=True)
class LoadPlan:
    """What to read: layers by their name in the base model, and notes for the listing."""

    layers: Mapping[str, PlannedLayer]
    notes: tuple[str, ...]


@dataclass
class _Check:
    """The state of one check; lives for one call of `plan_load`."""

    config: LoraConfigFile
    base: BaseFacts
    headers: Mapping[str, TensorHeader]
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    rule: NameRule = field(default_factory=NameRule)

    def rank_of(self, layer: str) -> int:
        key = get_pattern_key(list(self.config.rank_pattern), self.rule.to_adapter(layer))
        return self.config.rank_pattern.get(key, self.config.r)

    def scaling_of(self, layer: str) -> float:
        key = get_pattern_key(list(self.config.alpha_pattern), self.rule.to_adapter(layer))
        alpha = self.config.alpha_pattern.get(key, self.config.lora_alpha)
        return lora_scaling(alpha, self.rank_of(layer), self.config.use_rslora)


def plan_load(
    config: LoraConfigFile,
    headers: Sequence[TensorHeader],
    base: BaseFacts,
    *,
    max_rank: int,
    explained: Collection[str] = (),
) -> tuple[LoadPlan, list[Finding]]:
    """Check an adapter and say what to read.

    Args:
        config: the served keys of its config.
        headers: all tensors of its file.
        base: the model it is to be loaded on.
        max_rank: the rank the slots were sized for.
        explained: config keys that are already refused; tensors of theirs are not reported again.

    Returns:
        The plan and the findings. The plan may be used only if there are no findings.
    """
    check = _Check(config, base, {header.name: header for header in headers}, [])
    _check_task(check)
    halves, others = _split(check)
    _check_others(check, others, explained)
    if not halves:
        if not others:  # else it is known by now what the file holds instead
            check.findings.append(damaged("the file holds no tensor"))
        return LoadPlan({}, ()), check.findings
    modules = {half.module for half in halves}
    check.rule = choose_rule(modules, base.layers)
    layers = _group(check, halves)
    if not layers:
        text = "no tensor names a linear of this model: "
        prefix = common_prefix(modules)
        text += f"all lie below {prefix!r}" if prefix else f"they name {listing(sorted(modules))}"
        check.findings.append(mismatch(text))
        return LoadPlan({}, ()), check.findings
    targets = _select_targets(check)
    _compare_targets(check, targets, layers)
    _check_patterns(check, targets)
    _check_layers(check, layers)
    _check_capacity(check, targets | set(layers), max_rank)
    plan = {
        name: PlannedLayer(tensors["lora_A"], tensors["lora_B"], check.scaling_of(name))
        for name, tensors in layers.items()
        if len(tensors) == 2
    }
    return LoadPlan(plan, tuple(check.notes)), check.findings


def _check_task(check: _Check) -> None:
    task = check.config.task_type
    if task is not None and task != check.base.task:
        text = f"the adapter is for the task {task} but the model's is {check.base.task}"
        check.findings.append(mismatch(text, f"load it on a model for {task}"))


def _split(check: _Check) -> tuple[list[HalfName], list[str]]:
    halves, others = [], []
    for name in check.headers:
        half = parse_half(name)
        if half is None:
            others.append(name)
        else:
            halves.append(half)
    adapters = {half.adapter for half in halves}
    if len(adapters) > 1:
        found = listing(sorted(name or "(none)" for name in adapters))
        check.findings.append(damaged(f"tensors of more than one adapter in the file: {found}"))
    elif adapters and (only := adapters.pop()) is not None:
        check.notes.append(f"tensor names carry the adapter name {only!r}")
    if any(not half.prefixed for half in halves):
        check.notes.append("tensor names without PEFT's prefix 'base_model.model.'")
    return halves, others


def _check_others(check: _Check, others: Sequence[str], explained: Collection[str]) -> None:
    for feature, (key, tensors) in features_of(others, explained).items():
        unset = f" although the config does not set {key}" if key else ""
        text = f"tensors that would not be used: {feature}{unset}: {listing(tensors)}"
        # Not "remove them": without them the rest would compute something else.
        remedy = "use an adapter that was trained without this feature"
        check.findings.append(unsupported(text, remedy))


def _group(check: _Check, halves: Sequence[HalfName]) -> dict[str, dict[str, str]]:
    """Tensor names by base layer and half; what names no layer becomes a finding."""
    layers: dict[str, dict[str, str]] = {}
    strangers = []
    for half in halves:
        name = check.rule.to_base(half.module)
        if name not in check.base.layers:
            strangers.append(half)
            continue
        tensors = layers.setdefault(name, {})
        if half.half in tensors:
            text = f"layer {name!r} has two tensors {half.half}: {tensors[half.half]!r} and "
            check.findings.append(damaged(text + repr(half.tensor)))
        tensors[half.half] = half.tensor
    if layers:
        _check_strangers(check, strangers)
        if check.rule.note is not None:
            check.notes.append(check.rule.note)
    return layers


def _check_strangers(check: _Check, strangers: Sequence[HalfName]) -> None:
    modules = set(check.base.modules)
    for in_model, why in (
        (True, "they name modules that are no linear"),
        (False, "they name no module of the model"),
    ):
        names = [
            half.tensor
            for half in strangers
            if (check.rule.to_base(half.module) in modules) is in_model
        ]
        if names:
            text = f"tensors that would not be used, because {why}: {listing(names)}"
            check.findings.append(mismatch(text))


def _select_targets(check: _Check) -> set[str]:
    """The layers that PEFT would give an adapter of this config; others become findings."""
    targets = _target_modules(check)
    if targets is None:
        return set()
    config = check.config
    # A LoraConfig, because PEFT's matching may read any of its fields.
    selection = LoraConfig(
        target_modules=targets,
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
    )

    def selected(name: str) -> bool:
        return bool(check_target_module_exists(selection, check.rule.to_adapter(name)))

    layers = {name for name in check.base.layers if selected(name)}
    others = [
        name
        for name in check.base.modules
        if name and name not in check.base.layers and selected(name)
    ]
    if others:
        text = f"target_modules also selects what is no linear: {listing(others)}"
        check.findings.append(unsupported(text, "train the adapter on linears only"))
    if isinstance(config.target_modules, list):
        _note_unmatched(check, config.target_modules)
    return layers


def _note_unmatched(check: _Check, entries: Sequence[str]) -> None:
    # PEFT accepts these, and lists made for several models are common. The tensors are compared
    # with what is selected, so nothing can be missed by it.
    names = [check.rule.to_adapter(name) for name in check.base.layers]
    unmatched = [
        entry
        for entry in entries
        if not any(name == entry or name.endswith(f".{entry}") for name in names)
    ]
    if unmatched:
        check.notes.append(f"target_modules entries that name no layer: {listing(unmatched)}")


def _target_modules(check: _Check) -> list[str] | str | None:
    """`target_modules` with "all-linear" and null resolved as PEFT does it."""
    targets = check.config.target_modules
    if targets is None:
        table = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        targets = table.get(check.base.model_type)
        if targets is None:
            kind = check.base.model_type
            text = f"target_modules is null and PEFT has no default for models of type {kind!r}"
            check.findings.append(unsupported(text, "name the targets in adapter_config.json"))
            return None
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
    missing = [name for name in check.base.layers if name in targets and name not in layers]
    if missing:
        text = f"the config targets layers for which the file has no tensors: {listing(missing)}"
        check.findings.append(mismatch(text))
    extra = [name for name in layers if name not in targets]
    if extra:
        text = f"the file has tensors for layers that the config does not target: {listing(extra)}"
        check.findings.append(mismatch(text))


def _check_patterns(check: _Check, targets: Collection[str]) -> None:
    names = [check.rule.to_adapter(name) for name in targets]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = list(getattr(check.config, key))
        in_effect = {get_pattern_key(patterns, name) for name in names}
        for pattern in patterns:
            if not any(get_pattern_key([pattern], name) == pattern for name in names):
                text = f"the {key} entry {pattern!r} matches no target"
                check.findings.append(mismatch(text, f"correct or remove the {key} entry"))
            elif pattern not in in_effect:
                note = f"the {key} entry {pattern!r} is hidden by entries before it, as in PEFT"
                check.notes.append(note)


def _check_layers(check: _Check, layers: Mapping[str, Mapping[str, str]]) -> None:
    dtypes: dict[str, list[str]] = {}
    for name, tensors in layers.items():
        layer = check.base.layers[name]
        if layer.refusal is not None:
            text = f"layer {name!r} cannot take a branch: {layer.refusal}"
            check.findings.append(unsupported(text, "train the adapter without this layer"))
        for half in ("lora_A", "lora_B"):
            if half not in tensors:
                text = f"layer {name!r} has no {half}"
                check.findings.append(damaged(text, "the file is incomplete: save it again"))
                continue
            header = check.headers[tensors[half]]
            if header.dtype not in SERVED_DTYPES:
                dtypes.setdefault(header.dtype, []).append(header.name)
            _check_shape(check, layer, half, header)
    for dtype, names in dtypes.items():
        kind = f"{dtype} (float8)" if dtype.startswith("F8") else dtype
        text = f"tensors stored as {kind}: {listing(names)}"
        remedy = "save the adapter in float32, float16 or bfloat16"
        check.findings.append(unsupported(text, remedy))


def _check_shape(check: _Check, layer: TargetLayer, half: str, header: TensorHeader) -> None:
    where = f"layer {layer.name!r}: {half}"
    if len(header.shape) != 2:
        text = f"{where} has {len(header.shape)} dimensions {list(header.shape)} instead of 2"
        check.findings.append(damaged(text, "save the adapter with all shards gathered"))
        return
    if half == "lora_A":
        (rank, size), end, features = header.shape, "inputs", layer.in_features
    else:
        (size, rank), end, features = header.shape, "outputs", layer.out_features
    if size != features:
        text = f"{where} is for {size} {end} but the layer has {features}"
        check.findings.append(mismatch(text))
    expected = check.rank_of(layer.name)
    if rank != expected:
        text = f"{where} has rank {rank} but the config says {expected}"
        remedy = "use the adapter_config.json that was saved with these tensors"
        check.findings.append(damaged(text, remedy))


def _check_capacity(check: _Check, layers: Collection[str], max_rank: int) -> None:
    rank = max(check.rank_of(name) for name in layers)
    if rank > max_rank:
        text = f"adapter has rank {rank} but slots were sized for {max_rank}"
        remedy = f"wrap with max_lora_rank={rank} (command line: --max-lora-rank {rank})"
        check.findings.append(Finding(AdapterCapacityError, text, remedy))
