"""Which linears of a checkpoint are quantised, decided from its config and headers alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, field_validator
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.errors import CheckpointError, ConfigError
from ..core.scheme import SCHEMES, LinearScheme
from ..linear.checkpoint import TensorHeader
from ..linear.experts.find import holds_experts
from ..linear.weights import LinearModule, kind_refusal, linear_shape
from .base_facts import base_facts
from .checkpoint_names import CheckpointNames, checkpoint_names, tied_weight
from .folder import model_class, read_config
from .settings import Ignore, Percentile, QuantizeHead, Settings, ignored_linears
from .stored_experts import StoredProjection, find_stored_experts

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WEIGHT = ".weight"
_STACKED = "its experts lie in one tensor, and the format has linears alone"
_OWN_SCALES = "linears of single experts would have global scales of their own"
#: Of a weight of all experts.
_DIMENSIONS = 3
_NO_HEAD = "it is the output head"


class QuantizeConfig(Settings):
    """How a checkpoint is quantised.  Field descriptions are the command line's help."""

    scheme: Annotated[str, Field(description=f"One of {', '.join(SCHEMES)}.")]
    percentile: Percentile = 100.0
    quantize_lm_head: QuantizeHead = False
    ignore: Ignore = ()

    @field_validator("scheme")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if value not in SCHEMES:
            raise ValueError(f"unknown scheme; choose one of {', '.join(SCHEMES)}")
        return value

    @property
    def linear_scheme(self) -> LinearScheme:
        """Of every linear that is quantised."""
        return SCHEMES[self.scheme]


@dataclass(frozen=True)
class QuantizePlan:
    """What is quantised, and what is not.

    Attributes:
        linears: name in the checkpoint -> name in the model, of those that are quantised; linears
            of single experts have the name of their projection.
        unquantized: the other linears and projections of experts by their names in the model, with
            the reason.
        ignore: names that readers must leave alone: those of `unquantized`, and the checkpoint's
            own where they differ.
        dtype: weights are rounded to it before they are quantised, as loading the model does;
            None for the checkpoint's own.
    """

    linears: Mapping[str, str]
    unquantized: Mapping[str, str]
    ignore: tuple[str, ...]
    dtype: torch.dtype | None

    def without(self, names: Collection[str], reason: str) -> QuantizePlan:
        """The plan that leaves the linears of these names in the model as they are."""
        kept = {stored: name for stored, name in self.linears.items() if name not in names}
        out = {name: stored for stored, name in self.linears.items() if name in names}
        ignore = dict.fromkeys((*self.ignore, *out, *out.values()))
        reasons = {**self.unquantized, **dict.fromkeys(out, reason)}
        return replace(self, linears=kept, unquantized=reasons, ignore=tuple(ignore))


def plan_quantization(
    folder: Path, headers: Mapping[str, TensorHeader], settings: QuantizeConfig
) -> QuantizePlan:
    """Decide for every linear of the model in `folder`.

    Args:
        folder: of the checkpoint.
        headers: of all of its tensors.
        settings: scheme, and what to leave out.

    Raises:
        ConfigError: settings that do not fit the model, or leave nothing quantised.
        CheckpointError: a weight that is no float matrix of the model's shape.
        WrapError: transformers has no class for the model.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = model_class(config, folder)(config)
    names = checkpoint_names(model, headers)
    experts, left = _experts(model, names, headers)
    reasons = _reasons(model, names, settings, (*experts, *left))
    linears = {
        names.stored[name]: name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in reasons
    }
    shapes = {stored: linear_shape(_linear(model, name)) for stored, name in linears.items()}
    for name, projection in experts.items():
        if name not in reasons:
            singles = [linear for half in projection.halves for linear in half]
            linears |= dict.fromkeys(singles, name)
            shapes |= dict.fromkeys(singles, projection.shape)
    if not linears:
        reason = f"leaves no linear to quantise: {'; '.join(sorted(set(reasons.values())))}"
        raise ConfigError(f"scheme {settings.scheme}", reason, "quantise another model")
    for stored, shape in shapes.items():
        _check(stored, shape, headers)
    _check_groups(shapes, settings)
    ignore = dict.fromkeys(
        stored for name in reasons if name not in left for stored in _stored(name, names, experts)
    )
    ignore |= dict.fromkeys(_routers(model, names, experts))
    dtype = config.dtype if config.dtype in _FLOATS else None
    return QuantizePlan(linears, {**reasons, **left}, tuple(ignore), dtype)


def _experts(
    model: PreTrainedModel, names: CheckpointNames, headers: Mapping[str, TensorHeader]
) -> tuple[dict[str, StoredProjection], dict[str, str]]:
    """Projections of experts that are linears in the checkpoint, and why others are none."""
    found, refused = find_stored_experts(model, names, headers)
    known = {
        f"{name}.{projection}": stored
        for name, experts in found.items()
        for projection, stored in experts.projections.items()
    }
    left = {
        f"{name}.{projection}": refused.get(name, _STACKED)
        for name, module in model.named_modules()
        if name not in found and holds_experts(module)
        for projection, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == _DIMENSIONS
    }
    return known, left


def _stored(
    name: str, names: CheckpointNames, experts: Mapping[str, StoredProjection]
) -> tuple[str, ...]:
    """What readers may call a linear, or the linears of a projection, that stays."""
    if name in experts:
        return tuple(linear for half in experts[name].halves for linear in half)
    return name, names.stored.get(name, name)


def _routers(
    model: PreTrainedModel, names: CheckpointNames, experts: Iterable[str]
) -> Iterator[str]:
    """Matrices beside experts that are no linears here, but that other readers take for such."""
    blocks = {name.rpartition(".")[0].rpartition(".")[0] for name in experts}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        beside = name.rpartition(".")[0] in blocks and name in names.stored
        if beside and not isinstance(module, nn.Linear) and getattr(weight, "ndim", 0) == 2:
            yield names.stored[name]


def _reasons(
    model: PreTrainedModel,
    names: CheckpointNames,
    settings: QuantizeConfig,
    experts: Sequence[str],
) -> dict[str, str]:
    """Why linears, and projections of experts, stay as they are."""
    candidates = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
    ]
    ignored = ignored_linears((*candidates, *experts), settings.ignore)
    head = base_facts(model).output_embedding
    reasons: dict[str, str] = {}
    modules = {name.rpartition(".")[0] for name in experts if name in ignored}
    for name in experts:
        # Readers take all projections of a layer's experts as quantised, or none.
        if name in ignored:
            reasons[name] = f"ignored by {ignored[name]!r}"
        elif name.rpartition(".")[0] in modules:
            reasons[name] = "the other projection of these experts is ignored"
        elif settings.linear_scheme.weight.global_scale:
            reasons[name] = _OWN_SCALES
    for name in candidates:
        module = model.get_submodule(name)
        refusal = kind_refusal(module)
        tied = tied_weight(model, name)
        if name in ignored:
            reasons[name] = f"ignored by {ignored[name]!r}"
        elif refusal is not None:
            reasons[name] = refusal
        elif isinstance(module, Conv1D):
            reasons[name] = "it is a Conv1D, which no reader of the format takes for a linear"
        elif name == head and not settings.quantize_lm_head:
            reasons[name] = _NO_HEAD
        elif tied is not None and name == head:
            raise ConfigError(
                "quantize_lm_head",
                f"cannot quantise {name}: its weight is {tied.removesuffix(_WEIGHT)}'s too",
                "leave quantize_lm_head out (command line: --quantize-lm-head), or save the model "
                "with tie_word_embeddings=false first",
            )
        elif tied is not None:
            reasons[name] = f"its weight is {tied.removesuffix(_WEIGHT)}'s too"
        elif name not in names.stored:
            reasons[name] = "transformers makes its weight from other tensors of the checkpoint"
    return reasons


def _linear(model: PreTrainedModel, name: str) -> LinearModule:
    module = model.get_submodule(name)
    assert isinstance(module, LinearModule)
    return module


def _check(stored: str, wanted: tuple[int, int], headers: Mapping[str, TensorHeader]) -> None:
    header = headers.get(f"{stored}.weight")
    if header is None or header.dtype not in _FLOATS or header.shape != wanted:
        found = "no weight" if header is None else f"a weight {header.dtype} {header.shape}"
        reason = f"has {found}, expected float16, bfloat16 or float32 {wanted}"
        raise CheckpointError(stored, reason, "pass an unquantised checkpoint of this model")


def _check_groups(shapes: Mapping[str, tuple[int, int]], settings: QuantizeConfig) -> None:
    """Other readers of the format take no part of a group: name all that have one at once."""
    columns = settings.linear_scheme.weight.columns
    tails: dict[str, list[str]] = {}
    for stored, (_, inputs) in shapes.items():
        if columns and inputs % columns:
            pattern = f"*.{stored.rpartition('.')[2]}"
            tails.setdefault(f"{pattern} ({inputs})", []).append(stored)
    if not tails:
        return
    count = sum(map(len, tails.values()))
    patterns = [kind.partition(" ")[0] for kind in tails]
    raise ConfigError(
        f"scheme {settings.scheme}",
        f"takes inputs in groups of {columns}; {count} of {len(shapes)} linears have other "
        f"columns: {', '.join(tails)}",
        f"leave them out with ignore={patterns} (command line: "
        + " ".join(f"--ignore '{pattern}'" for pattern in patterns)
        + "), or use fp8-dynamic; wrap(quant=...) (command line: --quant) serves them so, the last "
        "group cut short",
    )
