"""Which linears of a checkpoint are quantised, decided from its config and headers alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
from ..linear.weights import kind_refusal
from .base_facts import base_facts
from .checkpoint_names import CheckpointNames, checkpoint_names, tied_weight
from .folder import model_class, read_config
from .settings import Ignore, Percentile, QuantizeHead, Settings, ignored_linears

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WEIGHT = ".weight"
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
        linears: name in the checkpoint -> name in the model, of those that are quantised.
        unquantized: the other linears by their names in the model, with the reason.
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
    reasons = _reasons(model, names, settings)
    linears = {
        names.stored[name]: name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in reasons
    }
    if not linears:
        reason = f"leaves no linear to quantise: {'; '.join(sorted(set(reasons.values())))}"
        raise ConfigError(f"scheme {settings.scheme}", reason, "quantise another model")
    for stored, name in linears.items():
        _check(stored, model.get_submodule(name), headers)
    _check_groups({stored: model.get_submodule(name) for stored, name in linears.items()}, settings)
    ignore = dict.fromkeys(
        stored for name in reasons for stored in (name, names.stored.get(name, name))
    )
    dtype = config.dtype if config.dtype in _FLOATS else None
    return QuantizePlan(linears, reasons, tuple(ignore), dtype)


def _reasons(
    model: PreTrainedModel, names: CheckpointNames, settings: QuantizeConfig
) -> dict[str, str]:
    """Why linears stay as they are."""
    candidates = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
    ]
    ignored = ignored_linears(candidates, settings.ignore)
    head = base_facts(model).output_embedding
    reasons: dict[str, str] = {}
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


def _check(stored: str, module: nn.Module, headers: Mapping[str, TensorHeader]) -> None:
    assert isinstance(module, nn.Linear)
    header = headers.get(f"{stored}.weight")
    wanted = (module.out_features, module.in_features)
    if header is None or header.dtype not in _FLOATS or header.shape != wanted:
        found = "no weight" if header is None else f"a weight {header.dtype} {header.shape}"
        reason = f"has {found}, expected float16, bfloat16 or float32 {wanted}"
        raise CheckpointError(stored, reason, "pass an unquantised checkpoint of this model")


def _check_groups(linears: Mapping[str, nn.Module], settings: QuantizeConfig) -> None:
    """Other readers of the format take no part of a group: name all that have one at once."""
    columns = settings.linear_scheme.weight.columns
    tails: dict[str, list[str]] = {}
    for stored, module in linears.items():
        assert isinstance(module, nn.Linear)
        if columns and module.in_features % columns:
            pattern = f"*.{stored.rpartition('.')[2]}"
            tails.setdefault(f"{pattern} ({module.in_features})", []).append(stored)
    if not tails:
        return
    count = sum(map(len, tails.values()))
    patterns = [kind.partition(" ")[0] for kind in tails]
    raise ConfigError(
        f"scheme {settings.scheme}",
        f"takes inputs in groups of {columns}; {count} of {len(linears)} linears have other "
        f"columns: {', '.join(tails)}",
        f"leave them out with ignore={patterns} (command line: "
        + " ".join(f"--ignore '{pattern}'" for pattern in patterns)
        + "), or use fp8-dynamic; wrap(quant=...) (command line: --quant) serves them so, the last "
        "group cut short",
    )
