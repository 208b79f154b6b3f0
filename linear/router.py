"""Routers: modules that multiply with a weight of their own, and take adapters all the same.

A router of transformers' experts is no linear: it holds a weight (E, H), multiplies its input with
it by `torch.nn.functional.linear`, perhaps after a cast, and goes on with the scores.  An adapter's
branch has to be added to that product, in the middle of the module's forward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from ..core.errors import BatchError
from . import ops
from .batch import Batch
from .branching import BatchSource, Branch, BranchInput, BranchRows, RowLayout, refuse_misfit
from .probing import PROBE_ERRORS, probing

_CASTS = frozenset(
    (
        torch.Tensor.to,
        torch.Tensor.type,
        torch.Tensor.float,
        torch.Tensor.bfloat16,
        torch.Tensor.half,
        torch.Tensor.type_as,
        torch.Tensor.contiguous,
    )
)
_NO_ROUTERS = (nn.Linear, nn.Embedding, Conv1D)


def holds_router(module: nn.Module) -> bool:
    """Whether a module looks like a router: a matrix of its own alone, and no linear."""
    children = (p for child in module.children() for p in child.parameters())
    if isinstance(module, _NO_ROUTERS) or next(children, None) is not None:
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.dtype.is_floating_point


class _Products(TorchFunctionMode):
    """Sees each product with one weight, or with a cast of it, and may change it.

    Args:
        weight: (N, K).
        changed: given the product and what was multiplied, what takes its place.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        changed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        # Held, so that no other tensor can have their identities.
        self._weights = {id(weight): weight}
        self._changed = changed
        self.count = 0

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _CASTS and id(args[0]) in self._weights:
            self._weights[id(out)] = out
        elif func is F.linear and len(args) > 1 and id(args[1]) in self._weights:
            self.count += 1
            out = self._changed(out, args[0])
        return out


def products(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> int:
    """How often a call of `module` multiplies with its weight by `F.linear`."""
    with torch.no_grad(), _Products(module.get_parameter("weight"), lambda out, x: out) as seen:
        module(*args, **kwargs)
    return seen.count


#: Sizes of the two leading dimensions of probes: no two of them, nor their products, are alike.
_PROBES = ((3, 5), (7, 2))


@dataclass(frozen=True)
class RouterOutputs:
    """What a router returns, as a graph that does not see into it has to know.

    Attributes:
        sizes: of each output its dimensions: a number, or which leading dimensions of the input
            are multiplied to it.
        dtypes: of each output.
        alone: it is one tensor and not a tuple.
    """

    sizes: tuple[tuple[int | tuple[int, ...], ...], ...]
    dtypes: tuple[torch.dtype, ...]
    alone: bool

    @classmethod
    def found(cls, module: nn.Module, dimensions: int) -> RouterOutputs | None:
        """Of a module that takes (..., K), of 2 or 3 `dimensions`, found by calling it.

        What else its forward requires is taken for a number an expert, as biases of choices are.
        None where a graph cannot be told: it returns something else than tensors, or sizes that
        do not follow from those of its input.
        """
        weight = module.get_parameter("weight")
        more = [weight.new_zeros(weight.shape[0])] * required_beside(module)
        made = []
        for probe in _PROBES:
            leading = probe[: dimensions - 1]
            x = torch.zeros(*leading, weight.shape[1], dtype=weight.dtype, device=weight.device)
            with torch.no_grad(), probing():
                out = type(module).forward(module, x, *more)
            alone = isinstance(out, torch.Tensor)
            tensors = (out,) if alone else out
            if type(tensors) is not tuple or not all(isinstance(t, torch.Tensor) for t in tensors):
                return None
            made.append((leading, tensors, alone))
        (first, one, alone), (second, other, _) = made
        if [t.dim() for t in one] != [t.dim() for t in other]:
            return None
        sizes = [
            tuple(_size(n, m, first, second) for n, m in zip(a.shape, b.shape, strict=True))
            for a, b in zip(one, other, strict=True)
        ]
        if any(size is None for of_one in sizes for size in of_one):
            return None
        return cls(tuple(sizes), tuple(t.dtype for t in one), alone)  # type: ignore[arg-type]

    def room(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Unwritten tensors of the outputs for `x` (..., K)."""
        leading = x.shape[:-1]
        return [
            x.new_empty(
                [n if isinstance(n, int) else math.prod(leading[i] for i in n) for n in sizes],
                dtype=dtype,
            )
            for sizes, dtype in zip(self.sizes, self.dtypes, strict=True)
        ]

    def returned(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The outputs as the module returns them."""
        return outputs[0] if self.alone else tuple(outputs)


def required_beside(module: nn.Module) -> int:
    """How many arguments the forward of `module` requires beside its first."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _size(
    one: int, other: int, first: tuple[int, ...], second: tuple[int, ...]
) -> int | tuple[int, ...] | None:
    if one == other:
        return one
    for places in ((0,), (1,), (0, 1)):
        if places[-1] < len(first) and one == math.prod(first[i] for i in places):
            return places if other == math.prod(second[i] for i in places) else None
    return None


class RouterPlace:
    """A router that takes adapters; its forward is replaced on the object.

    Args:
        module_name: full name of the module in the model; of the place, that of its weight.
        index: after those of all layers.
        module: proved by `products` to multiply with its weight once a call.
        source: answers for the batch in flight.
        row_layout: of its input; not UNKNOWN.
    """

    def __init__(
        self,
        module_name: str,
        index: int,
        module: nn.Module,
        source: BatchSource,
        row_layout: RowLayout,
    ) -> None:
        self.name = f"{module_name}.weight"
        self.index = index
        self.module = module
        self.row_layout = row_layout
        self.branch: Branch | None = None
        self._source = source
        self._forward: Callable[..., Any] = module.forward
        # By the number of dimensions of an input; looked for when the place is put in.
        self._outputs: dict[int, RouterOutputs] = {}
        self._beside = required_beside(module)
        # For what a graph cannot be told of beforehand: it breaks there.
        self._apart: Callable[..., Any] = torch.compiler.disable(self.run)
        self.handle = ops.register(self)

    @property
    def weight(self) -> torch.Tensor:
        """(N, K): N experts, K inputs."""
        return self.module.get_parameter("weight")

    def install(self) -> None:
        """Serve the module's calls from now on."""
        found = {dims: _outputs_of(self.module, dims) for dims in (2, 3)}
        self._outputs = {dims: outputs for dims, outputs in found.items() if outputs is not None}
        vars(self.module)["forward"] = self

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with the branches of this batch's rows; one op in a graph."""
        if not torch.compiler.is_compiling():
            return self.run(x, *args, **kwargs)
        outputs = self._outputs.get(x.dim())
        told = len(args) == self._beside and all(isinstance(a, torch.Tensor) for a in args)
        if outputs is None or not told or kwargs:
            return self._apart(x, *args, **kwargs)
        return outputs.returned(routed_router(x, list(args), self.handle))

    def room(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Unwritten outputs for `x`: what a compiled graph knows of them."""
        return self._outputs[x.dim()].room(x)

    def tensors(self, x: torch.Tensor, more: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`run` as an op gives it: tensors of their own, that share memory with no other.

        Raises:
            BatchError: as `run`; or the module returns other tensors than when it was wrapped.
        """
        made = self.run(x, *more)
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        room = self.room(x.to("meta"))
        if [(o.shape, o.dtype) for o in outputs] != [(r.shape, r.dtype) for r in room]:
            raise BatchError(
                f"router '{self.name}'",
                f"returned tensors of shapes {[tuple(o.shape) for o in outputs]} within a compiled "
                f"graph, which was made for {[tuple(r.shape) for r in room]}",
                "leave its module as it was when the model was wrapped",
            )
        taken = {given.untyped_storage().data_ptr() for given in (x, *more)}
        for index, out in enumerate(outputs):
            memory = out.untyped_storage().data_ptr()
            outputs[index] = out.clone() if memory in taken else out.contiguous()
            taken.add(memory)
        return outputs

    def uninstall(self) -> None:
        """Give the module its own forward back."""
        vars(self.module).pop("forward", None)

    def run(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with the branches of this batch's rows added to its product.

        Args:
            x: (..., K), what it chooses experts for.
            *args: what else it is handed.
            **kwargs: likewise.

        Raises:
            BatchError: its input has another number of rows than the batch.
        """
        batch = self._source.current_batch()
        if not batch.plan.branched[self.index]:
            return self._forward(x, *args, **kwargs)
        if batch.packed:
            batch = batch.fitting(x.shape)
        refuse_misfit(f"router '{self.name}'", self.row_layout, x.shape, batch)
        with _Products(self.weight, lambda out, fed: self._added(out, fed, batch)) as seen:
            result = self._forward(x, *args, **kwargs)
        if seen.count != 1:
            raise BatchError(
                f"router '{self.name}'",
                f"multiplied {seen.count} times with its weight, where an adapter's branch "
                "belongs to one product",
                "leave its module as it was when the model was wrapped",
            )
        return result

    def _added(self, out: torch.Tensor, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        assert self.branch is not None
        rows, source = BranchRows.at(self, batch), BranchInput(x, self.name)
        flat = out.reshape(-1, out.shape[-1])
        if batch.tokens is None or not flat.shape[0]:
            return self.branch.add(flat, source, rows).view(out.shape)
        mask = batch.tokens.mask(flat.shape[0] // rows.slots.shape[0], out.device)
        # A branch may write in place.
        return torch.where(mask, self.branch.add(flat.clone(), source, rows), flat).view(out.shape)


def _outputs_of(module: nn.Module, dimensions: int) -> RouterOutputs | None:
    # One that takes other inputs, or more than one, fails on zeros in its own way.
    try:
        return RouterOutputs.found(module, dimensions)
    except PROBE_ERRORS:
        return None


@torch.library.custom_op("branchline::routed_router", mutates_args=())
def routed_router(x: torch.Tensor, more: list[torch.Tensor], handle: int) -> list[torch.Tensor]:
    """The traced form of `RouterPlace.__call__`: all that the module returns for `x` (..., K)."""
    place: RouterPlace = ops.resolve(handle)
    return place.tensors(x, more)


@routed_router.register_fake
def _(x: torch.Tensor, more: list[torch.Tensor], handle: int) -> list[torch.Tensor]:
    return ops.resolve(handle).room(x)
