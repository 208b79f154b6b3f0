"""A short recorded forward: who makes, and who reads, the tensors that reach linears (I3)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from ..core.errors import BranchlineError, WrapError
from ..linear.branching import RowLayout
from ..linear.hooks import hooks_suspended
from ..linear.probing import probing
from ..linear.routed import RoutedLinear
from ..linear.router import holds_router
from .experts import RoutedExperts
from .identify import PROBE_ERRORS

# Reading shape or kind is no reading of values: QuantizedActivation answers these as well.
_METADATA = frozenset(
    f"torch.Tensor.{name}"
    for name in ("shape.__get__ dtype.__get__ device.__get__ ndim.__get__ size dim".split())
)


@dataclass(eq=False)
class Reading:
    """What the recorded forward showed of one tensor.

    Attributes:
        value: the tensor; held so that its identity is not reused while recording.
        origin: the innermost module that returned it, by name; "" for an op outside of any.
        linears: routed linears that read it.
        passed: modules it was handed to as an argument.
        others: ops that read it outside of a routed linear, with the module they ran in.
    """

    value: torch.Tensor
    origin: str
    linears: list[RoutedLinear] = field(default_factory=list)
    passed: dict[str, nn.Module] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


class _Recorder(TorchFunctionMode):
    """Sees who reads what, as a mode; without entering it, and with `glimpse`, inputs alone."""

    def __init__(
        self,
        names: Mapping[int, str],
        glimpse: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        self.readings: dict[int, Reading] = {}
        self.inputs: dict[str, Any] = {}
        self._inputs_alone = glimpse is not None
        self._keep = glimpse or _copied
        self.calls: dict[str, list[tuple[tuple, dict]]] = {}
        self._names = names
        self._stack: list[nn.Module] = []

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        # First, so that the copy counts as one of the module's own ops.
        self._stack.append(module)
        name = self._names[id(module)]
        given = self._input(module, args, kwargs)
        if given is not None:
            key = module.name if isinstance(module, RoutedLinear | RoutedExperts) else name
            self.inputs[key] = self._keep(given)
        if self._inputs_alone:
            return
        self.calls.setdefault(name, []).append((args, kwargs))
        for value in _tensors((args, kwargs)):
            reading = self.readings.get(id(value))
            if reading is not None:
                reading.passed[name] = module
        if isinstance(module, RoutedLinear):
            x = args[0] if args else kwargs["input"]
            reading = self.readings.setdefault(id(x), Reading(x, ""))
            reading.linears.append(module)

    def _input(self, module: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """What a module is fed, if it is one whose input tells something."""
        if isinstance(module, RoutedLinear):
            return args[0] if args else kwargs["input"]
        if isinstance(module, RoutedExperts):
            return args[0] if args else kwargs["hidden_states"]
        if holds_router(module) and args and isinstance(args[0], torch.Tensor):
            return args[0]
        given = (*args, *kwargs.values())
        if _is_leaf_with_weights(module) and len(given) == 1 and isinstance(given[0], torch.Tensor):
            return given[0]
        return None

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self._stack.pop()
        if self._inputs_alone:
            return
        for value in _tensors(output):
            self.readings.setdefault(id(value), Reading(value, self._names[id(module)]))

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        inside_linear = bool(self._stack) and isinstance(self._stack[-1], RoutedLinear)
        if name not in _METADATA and not inside_linear:
            where = self._describe(self._stack[-1]) if self._stack else "the caller"
            for value in _tensors((args, kwargs)):
                reading = self.readings.get(id(value))
                if reading is not None and self._left(reading):
                    reading.others.append(f"{name} in {where}")
        return func(*args, **kwargs)

    def _describe(self, module: nn.Module) -> str:
        return f"{self._names[id(module)] or 'the model'} ({type(module).__qualname__})"

    def _left(self, reading: Reading) -> bool:
        """Whether the tensor has left its maker: ops inside of it are how it was made."""
        return all(self._names[id(module)] != reading.origin for module in self._stack)


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone()


def _is_leaf_with_weights(module: nn.Module) -> bool:
    return bool(module._parameters) and next(module.children(), None) is None


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


@contextmanager
def _hooks(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    handles = []
    try:
        for module in model.modules():
            handles.append(
                module.register_forward_pre_hook(recorder.enter, with_kwargs=True, prepend=True)
            )
            handles.append(module.register_forward_hook(recorder.leave, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, eq=False)
class Recording:
    """Everything one recorded forward showed.

    Attributes:
        readings: one for every tensor that a routed linear read.
        inputs: the input of each linear, and of each other module that has weights, no children,
            and takes one tensor.
        calls: by module, the arguments of every call.
        others: by the module that made a tensor, who read it outside of a routed linear.
    """

    readings: tuple[Reading, ...]
    inputs: Mapping[str, torch.Tensor]
    calls: Mapping[str, list[tuple[tuple, dict]]]
    others: Mapping[str, list[str]]

    def only_tensor(self, module: str) -> torch.Tensor | str:
        """The one tensor that `module` was called with, once; else what it was called with."""
        calls = self.calls.get(module, [])
        if len(calls) != 1:
            return f"runs {len(calls)} times a forward"
        args, kwargs = calls[0]
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            return "is not called with just one tensor"
        return args[0]


def record(model: nn.Module, inputs: Mapping[str, Any]) -> Recording:
    """Run `model(**inputs)` once and see who reads what."""
    recorder = _Recorder({id(module): name for name, module in model.named_modules()})
    # Foreign hooks are readers on their own account, and may come and go: the plan asks for them.
    with (
        torch.no_grad(),
        probing(),
        hooks_suspended(model),
        _hooks(model, recorder),
        recorder,
    ):
        output = _run(model, inputs)
    for value in _tensors(dict(output) if isinstance(output, Mapping) else output):
        reading = recorder.readings.get(id(value))
        if reading is not None:
            reading.others.append("the model's output")
    readings = tuple(reading for reading in recorder.readings.values() if reading.linears)
    others: dict[str, list[str]] = {}
    for reading in recorder.readings.values():
        others.setdefault(reading.origin, []).extend(reading.others)
    return Recording(readings, recorder.inputs, recorder.calls, others)


def row_layouts(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], first: Recording
) -> dict[str, RowLayout]:
    """Where each linear's input keeps the rows of the batch, shown by changing one row.

    Token ids are run in a second shape as well: an expert that happened to see as many tokens as
    there are rows does not do so twice.

    Args:
        model: as recorded.
        inputs: tensors of two rows or more, batch first.
        first: the recording of these inputs.
    """
    shape = _BatchShape.of(inputs)
    layouts = _layouts(
        {name: shape.glimpse(x) for name, x in first.inputs.items()}, _changed(model, inputs)
    )
    if set(inputs) == {"input_ids"}:
        ids = inputs["input_ids"]
        wider = torch.cat([ids, ids.flip(0)], 1)
        other = {"input_ids": torch.cat([wider, wider[:1].flip(1)])[:, :-3]}
        again = _layouts(_glimpses(model, other), _changed(model, other))
        for name, layout in layouts.items():
            if again.get(name) != layout:
                layouts[name] = RowLayout.UNKNOWN
    return layouts


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        return model(**inputs)
    except BranchlineError:
        raise
    except PROBE_ERRORS as error:
        raise WrapError(
            f"the recorded forward of {type(model).__qualname__}",
            f"fails on {', '.join(inputs)}: {type(error).__name__}: {error}",
            "pass branchline.wrap an example={name: tensor of two rows} that the model takes "
            "(from Python only)",
        ) from error


@dataclass(frozen=True)
class _Glimpse:
    """An input of a linear: enough to see which of its rows differ from another forward's.

    Attributes:
        shape: of the input.
        layout: how it would keep the rows, going by its shape.
        kept: digest of what belongs to all rows but the last.
        last: digest of what belongs to the last.
    """

    shape: torch.Size
    layout: RowLayout
    kept: bytes
    last: bytes


@dataclass(frozen=True)
class _BatchShape:
    """How many rows a forward has, and of how many tokens; None where inputs have none."""

    rows: int
    tokens: int | None

    @classmethod
    def of(cls, inputs: Mapping[str, torch.Tensor]) -> _BatchShape:
        value = next(iter(inputs.values()))
        return cls(value.shape[0], value.shape[1] if value.dim() > 1 else None)

    def glimpse(self, x: torch.Tensor) -> _Glimpse:
        layout, kept = RowLayout.UNKNOWN, 0
        if x.dim() >= 2 and x.shape[0] == self.rows:
            layout, kept = RowLayout.ROWS, self.rows - 1
        elif x.dim() == 2 and self.tokens is not None and x.shape[0] == self.rows * self.tokens:
            layout, kept = RowLayout.FLAT, self.tokens * (self.rows - 1)
        if layout == RowLayout.UNKNOWN:
            return _Glimpse(x.shape, layout, b"", b"")
        return _Glimpse(x.shape, layout, _digest(x[:kept]), _digest(x[kept:]))


def _digest(x: torch.Tensor) -> bytes:
    """Of the bytes: whole inputs of a large model would fill the memory."""
    held = x.detach().cpu().contiguous().view(torch.uint8)
    return blake3(held.numpy().data).digest()


def _glimpses(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, _Glimpse]:
    """As `record`, of inputs alone."""
    shape = _BatchShape.of(inputs)
    recorder = _Recorder({id(m): name for name, m in model.named_modules()}, shape.glimpse)
    with torch.no_grad(), probing(), hooks_suspended(model), _hooks(model, recorder):
        _run(model, inputs)
    return recorder.inputs


def _changed(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, _Glimpse]:
    return _glimpses(model, {name: _change_last_row(value) for name, value in inputs.items()})


def _change_last_row(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    if value.dtype == torch.bool or value.unique().numel() < 2:
        return value
    value[-1] = value[-1].flip(-1)
    return value


def _layouts(first: Mapping[str, _Glimpse], second: Mapping[str, _Glimpse]) -> dict[str, RowLayout]:
    return {name: _layout(x, second.get(name)) for name, x in first.items()}


def _layout(x: _Glimpse, other: _Glimpse | None) -> RowLayout:
    if other is None or x.shape != other.shape:
        return RowLayout.UNKNOWN
    apart = x.kept == other.kept and x.last != other.last
    return x.layout if apart else RowLayout.UNKNOWN


def masked_readers(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Who else reads the tensors of linears when a row is padded, by the tensor's origin.

    Some models read a norm's output only to blank its padding.  Models that take no
    `attention_mask`, or fail on this one, have none; a reader that turns up later is refused.
    """
    ids = inputs.get("input_ids")
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    if ids is None or not takes_mask or "attention_mask" in inputs:
        return {}
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    try:
        recording = record(model, {**inputs, "attention_mask": mask})
    except WrapError:
        return {}
    return {origin: others for origin, others in recording.others.items() if origin}
