"""What adapters need to know of a model's experts, and of how earlier checkpoints kept them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from ..adapters.base import TargetExperts
from ..linear.experts.find import experts_form, holds_experts
from ..linear.experts.form import ExpertsForm
from ..linear.experts.quantized import QuantizedExperts
from ..linear.router import holds_router

# One linear of one expert, as the sources of transformers' conversions name it.
_EACH = re.compile(r"(?:.*\.)?\*\.(?P<linear>\w+)\.weight\$?")
# A part of a name between two dots, as its renamings name it.
_PART = re.compile(r"\.\w+\.")


@dataclass(frozen=True)
class _Earlier:
    """How checkpoints with a module for each expert name things.

    Attributes:
        linears: by the name of the parameter that they became: in the order of their outputs.
        renamed: parts of names (now, then).
    """

    linears: Mapping[str, tuple[str, ...]]
    renamed: tuple[tuple[str, str], ...]

    @classmethod
    # transformers compiles the rules of all models when it is first asked for one's.
    @lru_cache(maxsize=16)
    def of(cls, model_type: str) -> _Earlier:
        """As transformers converts checkpoints of this type of model."""
        linears: dict[str, tuple[str, ...]] = {}
        renamed: list[tuple[str, str]] = []
        rules = get_checkpoint_conversion_mapping(model_type) if model_type else None
        for rule in rules or ():
            sources, targets = list(rule.source_patterns), list(rule.target_patterns)
            if len(targets) != 1:
                continue
            if isinstance(rule, WeightConverter):
                found = [_EACH.fullmatch(source) for source in sources]
                if all(found):
                    parameter = targets[0].rpartition(".")[2]
                    linears[parameter] = tuple(match["linear"] for match in found if match)
            elif isinstance(rule, WeightRenaming) and len(sources) == 1:
                parts = (targets[0], sources[0])
                renamed += [parts] if all(map(_PART.fullmatch, parts)) else []
        return cls(linears, tuple(renamed))

    def name(self, experts: str) -> str:
        """What such a checkpoint calls the experts."""
        dotted = f".{experts}."
        for now, then in self.renamed:
            dotted = dotted.replace(now, then)
        return dotted.strip(".")


def expert_targets(modules: Mapping[str, nn.Module], model_type: str) -> dict[str, TargetExperts]:
    """The projections of all experts that can be served, and the weights of their routers.

    Args:
        modules: of the model, without PEFT's, by their full names.
        model_type: `config.model_type`.
    """
    found: dict[str, TargetExperts] = {}
    seen: set[int] = set()
    for name, module in modules.items():
        form = _form(module)
        if form is None or id(module) in seen:
            continue
        seen.add(id(module))
        earlier = _Earlier.of(model_type)
        for projection in _in_order(module, form):
            experts, outputs, inputs = form.shape(projection)
            linears = earlier.linears.get(projection, ())
            if outputs % max(len(linears), 1):
                linears = ()
            found[f"{name}.{projection}"] = TargetExperts(
                f"{name}.{projection}",
                experts,
                inputs,
                outputs,
                interleaved=form.interleaved and projection == form.up_name,
                transposed=form.transposed,
                linears=linears,
                earlier=earlier.name(name),
            )
    if found:
        found |= _routers(modules)
    return found


def _routers(modules: Mapping[str, nn.Module]) -> dict[str, TargetExperts]:
    """Weights of routers, as if they were parameters of one expert."""
    found = {}
    for name, module in modules.items():
        if holds_router(module):
            outputs, inputs = module.get_parameter("weight").shape
            # PEFT takes the sizes of a matrix in this order, whatever its version.
            found[f"{name}.weight"] = TargetExperts(
                f"{name}.weight", 1, inputs, outputs, transposed=True, is_router=True
            )
    return found


def _form(module: nn.Module) -> ExpertsForm | None:
    if isinstance(module, QuantizedExperts):
        return module.form
    # Whoever split them over ranks put a forward on them, which the wrap takes off.
    form = experts_form(module, own_forward=False) if holds_experts(module) else None
    return form if isinstance(form, ExpertsForm) else None


def _in_order(module: nn.Module, form: ExpertsForm) -> tuple[str, ...]:
    both = (form.up_name, form.down_name)
    registered = tuple(name for name, _ in module.named_parameters(recurse=False) if name in both)
    return registered if len(registered) == len(both) else both
