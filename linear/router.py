"""Routers: modules that multiply with a weight of their own, and take adapters all the same.

A router of transformers' experts is no linear: it holds a weight (E, H), multiplies its input with
it by `torch.nn.functional.linear`, perhaps after a cast, and goes on with the scores.  An adapter's
branch has to be added to that product, in the middle of the module's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from ..core.errors import BatchError
from .batch import Batch
from .branching import BatchSource, Branch, BranchInput, BranchRows, RowLayout, refuse_misfit

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
        # A graph holds no decision of a batch, and what a router returns is not known beforehand.
        self._call = torch.compiler.disable(self.run)

    @property
    def weight(self) -> torch.Tensor:
        """(N, K): N experts, K inputs."""
        return self.module.get_parameter("weight")

    def install(self) -> None:
        """Serve the module's calls from now on."""
        vars(self.module)["forward"] = self._call

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
