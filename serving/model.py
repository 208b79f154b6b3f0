"""The served model: what `wrap` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig

from ..adapters.invocation import Invocations
from ..adapters.manager import AdapterManager
from ..adapters.ready import RowName
from ..core.errors import BatchError, ConfigError, RefusedAttributeError
from ..core.team import then_alone
from ..fusion.discover import Discovery
from ..linear.batch import Batch, active_batch
from ..linear.calibration import Calibration
from ..linear.registry import LayerRegistry
from ..linear.routed import RoutedLinear
from ..policies.audit import AuditReport, audit
from ..policies.audit.build import Audited
from ..policies.cost import cost_model_of
from ..policies.planner import Planner
from ..policies.policy import make_policy
from .config import Quant, WrapConfig
from .parallel.ranks import Ranks
from .peft_surface import REFUSED, PeftSurface
from .requantize import requantized
from .row_tokens import first_input

_BATCHING = "it packs prompts into one row and runs in a thread of its own, without this batch"
_NOT_SAVED = "the quantised linears are no parameters, so a checkpoint would lack them"
_REFUSED = {
    "generate_batch": (_BATCHING, "call generate with adapter_names"),
    "init_continuous_batching": (_BATCHING, "call generate with adapter_names"),
    "continuous_batching_context_manager": (_BATCHING, "call generate with adapter_names"),
    "save_pretrained": (_NOT_SAVED, "save the model before wrapping, or after unwrap()"),
    "push_to_hub": (_NOT_SAVED, "push the model before wrapping, or after unwrap()"),
    "state_dict": (_NOT_SAVED, "use the model before wrapping, or after unwrap()"),
    "load_state_dict": (_NOT_SAVED, "load before wrapping"),
    "copying or pickling": ("hooks and slots belong to this one object", "wrap a copy instead"),
    **REFUSED,
}


def model_name(model: nn.Module) -> str:
    """What a report calls a model: the folder it came from, or its class."""
    path = getattr(model, "name_or_path", "")
    return str(path) or type(model).__qualname__


def _refuse(name: str) -> None:
    if name in _REFUSED:
        reason, remedy = _REFUSED[name]
        # Also an AttributeError, for code that asks with `hasattr` what a model can do.
        raise RefusedAttributeError(f"{name} of a served model", reason, remedy)


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The rows of a call's first input; None where it has none that shows them."""
    first = first_input(args, kwargs)
    return None if first is None else first.shape[0]


def _check_packed(batch: Batch, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    first = first_input(args, kwargs)
    if first is None:
        return
    tokens = first.shape[:2].numel()
    if tokens != batch.rows:
        raise BatchError(
            f"a packed batch of {tokens} tokens",
            f"but the batch names {batch.rows} tokens",
            "say how many tokens each row has in this step",
        )


class ServedModel(PeftSurface, nn.Module):
    """A model with routed linears, adapters and an audit.

    Call it, or `generate` with it, as the model it wraps.  Rows take adapters inside of
    ``with served.adapters.rows([...])`` or by ``adapter_names=[...]``; without either, all rows
    take the adapter that `set_adapter` made active, and are base rows where none is.

    Attributes:
        model: the wrapped transformers model.
        settings: how it was wrapped.
        registry: its routed linears.
        planner: makes the plans.
        adapters: load, swap, unload, list, rows.
        discovery: the sites.
        calibration: the observed input ranges; None without static scales.  `save` them to wrap
            the same model again without prompts.
        ranks: of the replica, where the model is split over several; else None.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: WrapConfig,
        registry: LayerRegistry,
        planner: Planner,
        adapters: AdapterManager,
        discovery: Discovery,
        calibration: Calibration | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        self.registry = registry
        self.planner = planner
        self.adapters = adapters
        self.discovery = discovery
        self.calibration = calibration
        self.ranks: Ranks | None = None
        self.undo = ExitStack()
        self.training = False

    def __getattr__(self, name: str) -> Any:
        """Whatever is not ours is the wrapped model's: config, device, get_input_embeddings ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            _refuse(name)
            return getattr(super().__getattr__("model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings of the wrapped model (generation_config ...) are set there."""
        model = self.__dict__.get("_modules", {}).get("model")
        own = name in self.__dict__ or name in self._modules or hasattr(type(self), name)
        if model is not None and not own and hasattr(model, name):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not served.

        Raises:
            ConfigError: always.
        """
        _refuse("state_dict")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not served.

        Raises:
            ConfigError: always.
        """
        _refuse("load_state_dict")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse("copying or pickling")

    def watch_rows(self) -> RemovableHandle:
        """Check the row count also where the wrapped model is called directly."""

        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                self._check_rows(args, kwargs)
                self._show_tokens(args, kwargs)

        return self.model.register_forward_pre_hook(check, with_kwargs=True)

    def forward(
        self, *args: Any, adapter_names: Sequence[RowName] | None = None, **kwargs: Any
    ) -> Any:
        """The wrapped model's forward.

        Args:
            *args: for the model.
            adapter_names: one adapter, None or a mixture (`Mixture`) for every row;
                instead of `adapters.rows`.
            **kwargs: for the model.

        Raises:
            BatchError: the number of rows is not that of the batch.
        """
        with torch.no_grad(), self._scope(adapter_names, _count(args, kwargs)):
            return self.model(*args, **kwargs)

    def generate(
        self, *args: Any, adapter_names: Sequence[RowName] | None = None, **kwargs: Any
    ) -> Any:
        """The wrapped model's `generate`; beams and returned sequences follow their row's adapter.

        Args:
            *args: for the model.
            adapter_names: one adapter, None or a mixture (`Mixture`) for every prompt;
                instead of `adapters.rows`.
            **kwargs: for the model.

        Raises:
            BatchError: the number of rows is not that of the batch; or beams, or several returned
                sequences, inside of `adapters.rows` (name the adapters by `adapter_names` then).
        """
        # The second argument of `generate`, if it is not named.
        if len(args) > 1 and isinstance(args[1], GenerationConfig):
            kwargs = {**kwargs, "generation_config": args[1]}
            args = (args[0], *args[2:])
        batch = active_batch(self.registry.owner)
        if batch is not None and batch.packed:
            raise BatchError(
                "generate inside of packed rows",
                "counts the tokens of one step, and generation takes many",
                "leave the block, or enter one for every step and call the model itself",
            )
        copies = self._copies(kwargs)
        if adapter_names is not None and not isinstance(adapter_names, str):
            adapter_names = [name for name in adapter_names for _ in range(copies)]
        elif copies > 1 and self._rows() is not None:
            raise BatchError(
                f"generate with {copies} sequences a prompt",
                "rows() names the adapters of the prompts only",
                "pass adapter_names=[...] to generate instead",
            )
        rows = _count(args, kwargs)
        with self._scope(adapter_names, None if rows is None else rows * copies):
            if copies == 1:
                self._check_rows(args, kwargs)
            generate: Any = self.model.generate
            return generate(*args, **kwargs)

    def audit(
        self,
        adapter_sets: Iterable[Iterable[str]] | None = None,
        policy: str | Sequence[str] | None = None,
        *,
        tokens: int = 64,
    ) -> AuditReport:
        """For every site: who consumes its output, its route for which adapters, why, its cost.

        Args:
            adapter_sets: sets of adapter names to plan for; None for: no adapter, each alone, all.
            policy: audit as if by this policy, or by several; None for the one in force.
            tokens: of the batches that bytes and seconds are counted for.

        Raises:
            ConfigError: a policy is unknown, or a set is one text.
            AdapterNotFoundError: a set names an adapter that is not loaded.
        """
        named = (policy,) if isinstance(policy, str) else tuple(policy or ())
        audited = Audited(
            self.planner,
            self.adapters,
            self.discovery.unsited,
            model=model_name(self.model),
            checkpoint=getattr(self.model, "branchline_checkpoint", None),
        )
        return audit(
            audited,
            tuple(map(make_policy, named)) or (self.planner.policy,),
            cost_model_of(self.planner.platform),
            adapter_sets=adapter_sets,
            tokens=tokens,
        )

    @then_alone
    def requantize(self, layer: str, quant: str | Quant) -> None:
        """Give one linear another scheme; every plan made before is made anew.

        A batch in flight goes on with its plan: call it between batches.  A linear of a quantised
        checkpoint is quantised again from the values it has now.

        Args:
            layer: its full name.
            quant: as `WrapConfig.quant`.

        Raises:
            ConfigError: no such linear or scheme; "none" where the checkpoint holds codes; or an
                adapter was computed with the linear's weights (DoRA).
            CalibrationError: the scheme needs ranges that the model was not wrapped with.
            KernelUnavailableError: no kernel serves it.
        """
        self.adapters.refuse_if_closed()
        self.adapters.refuse_if_computed_with(layer)
        found = self.registry.layers.get(layer)
        if found is None:
            raise ConfigError(f"linear {layer!r}", "is no routed linear", "see registry.layers")
        if quant not in tuple(Quant):
            raise ConfigError(f"quant={str(quant)!r}", "is unknown", f"use {', '.join(Quant)}")
        if not isinstance(found, RoutedLinear):
            raise ConfigError(
                f"linear {layer!r}",
                "is a projection of experts, which keep the scheme that they were wrapped with",
                "wrap the model again with another quant= (command line: --quant), or leave it out "
                "with ignore= (command line: --ignore)",
            )
        wanted = Quant(quant)
        force, float_kernel = self.settings.linear_kernel, self.settings.float_kernel
        found.kernel = requantized(found, wanted, self.calibration, force, float_kernel)

    def unwrap(self) -> nn.Module:
        """Give the model its own linears and forwards back; the served model is spent afterwards.

        Raises:
            ConfigError: batches are in flight.
        """
        self.adapters.close()
        self.undo.close()
        return self.model

    def train(self, mode: bool = True) -> ServedModel:
        """Only eval mode exists.

        Raises:
            ConfigError: training was asked for.
        """
        if mode:
            raise ConfigError("train()", "a served model cannot be trained", "unwrap it first")
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ServedModel:
        raise ConfigError(
            "moving or casting a served model",
            "its codes, scales and slots lie where the model was when it was wrapped",
            "move the model first, then wrap it",
        )

    # --- rows -----------------------------------------------------------------------------------

    def _rows(self) -> int | None:
        batch = active_batch(self.registry.owner)
        return None if batch is None else batch.rows

    def _check_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = active_batch(self.registry.owner)
        if batch is not None and batch.packed:
            _check_packed(batch, args, kwargs)
            return
        rows = self._rows()
        given = _count(args, kwargs)
        if rows is not None and given is not None and given != rows:
            raise BatchError(
                f"a batch of {given} rows",
                f"but {rows} rows were named",
                "name one adapter (or None) for every row",
            )

    def _show_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Activated adapters of the batch look for their invocation tokens."""
        batch = active_batch(self.registry.owner)
        if batch is None or not isinstance(batch.tokens, Invocations):
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        past = 0 if cache is None else int(cache.get_seq_length())
        batch.tokens.see(ids, past=past)

    def _copies(self, kwargs: dict[str, Any]) -> int:
        settings = kwargs.get("generation_config") or getattr(self.model, "generation_config", None)

        def setting(name: str) -> int:
            return kwargs.get(name) or getattr(settings, name, None) or 1

        beams = setting("num_beams")
        return beams if beams > 1 else setting("num_return_sequences")
