"""How many tokens each row has in the forward that runs: seen where the model is entered.

A layer that is fed all tokens one after the other can tell whose each one is only where it knows
that none was left out.  So the entries of the model (itself, and the models inside of it that
callers run by themselves) show the batch in flight how many tokens its rows have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..linear import ops
from ..linear.batch import active_batch
from ..linear.branching import RowLayout
from ..linear.experts.layer import ExpertsLinear
from ..linear.registry import LayerRegistry

# Inputs whose first dimension is the batch's rows, by the names transformers gives them.
_ROW_INPUTS = (
    "input_ids", "inputs", "inputs_embeds", "decoder_input_ids", "pixel_values", "input_features",
)  # fmt: skip


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """A call's first input; None where it has none that shows its rows."""
    where = _first(args, kwargs)
    if where is None:
        return None
    return args[0] if isinstance(where, int) else kwargs[where]


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Position or name of a call's first input."""
    if args and isinstance(args[0], torch.Tensor):
        return 0 if args[0].dim() else None
    for name in _ROW_INPUTS:
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor):
            return name if value.dim() else None
    return None


class RowTokens:
    """Shows batches how many tokens their rows have.

    Args:
        registry: of the model.
    """

    def __init__(self, registry: LayerRegistry) -> None:
        self._owner = registry.owner
        self._handle = ops.register(self)

    @staticmethod
    def are_asked_for(registry: LayerRegistry) -> bool:
        """Whether some place of the model is fed all tokens one after the other."""
        layouts = (getattr(place, "row_layout", None) for place in registry.places.values())
        experts = any(isinstance(layer, ExpertsLinear) for layer in registry)
        return experts or RowLayout.FLAT in layouts

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Look at every entry of `model`; inside of a compiled graph too."""
        return [
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            for module in _entries(model)
        ]

    def see(self, x: torch.Tensor) -> None:
        """Note the shape of a first input, (R, T, ...), for the batch in flight."""
        batch = active_batch(self._owner)
        if batch is not None and not batch.packed:
            batch.row_tokens = x.shape[1] if x.dim() > 1 else None

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        where = _first(args, kwargs)
        if where is None:
            return None
        first = args[0] if isinstance(where, int) else kwargs[where]
        if not torch.compiler.is_compiling():
            self.see(first)
            return None
        # A graph bakes in what Python sees while it is traced: it has to look when it runs.
        shown = ops.entered(first, self._handle)
        if isinstance(where, int):
            return (shown, *args[1:]), kwargs
        return args, {**kwargs, where: shown}


def _entries(model: nn.Module) -> list[nn.Module]:
    """The model, and the models inside of it that run by themselves: base, encoder, decoder."""
    config = getattr(model, "config", None)
    found: dict[int, nn.Module] = {id(model): model}
    names = ["base_model"]
    if getattr(config, "is_encoder_decoder", False):
        names += ["encoder", "decoder"]
    holder: Any = model
    for name in names:
        inner = getattr(holder, name, None)
        if isinstance(inner, nn.Module):
            found[id(inner)] = inner
            holder = inner if name == "base_model" else holder
    return list(found.values())
