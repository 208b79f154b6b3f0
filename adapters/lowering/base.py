"""What every lowering stands on: the linear that is adapted, its effect, and the tensor checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from ...core.errors import AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError

Shapes = dict[str, tuple[int, ...]]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Effect(Enum):
    """What an adapter does to the linear that holds it, by what it needs of the linear's input."""

    RAW = "reads the raw input beside the base"
    OUTPUT = "acts on the base's output only"
    INPUT = "changes the input before the base"
    BYPASS = "computes with the base's weight instead of the base"
    EDIT = "edits the base's weight during the forward"


@dataclass(frozen=True, eq=False)
class BaseLinear:
    """The linear of K inputs and N outputs that one module of an adapter belongs to.

    Args:
        name: its full name in the base model; errors are about it.
        in_features: K.
        out_features: N.
        weight: gives the weight as computed with (dequantised, where it is quantised), float32
            `(N, K)` whatever the layout of the module; None where it is not to be had.
        bias: `(N,)` of any float dtype, None where the linear has none.
        max_rank: products of a higher rank are lowered to a dense delta.
    """

    name: str
    in_features: int
    out_features: int
    weight: Callable[[], torch.Tensor] | None = None
    bias: torch.Tensor | None = None
    max_rank: int = 256

    def float_weight(self, peft_type: str) -> torch.Tensor:
        """The weight, float32 `(N, K)`.

        Raises:
            AdapterUnsupportedError: it is not to be had, and `peft_type` needs it.
            AdapterMismatchError: it has another shape.
        """
        if self.weight is None:
            raise self._not_at_hand(peft_type, "weight")
        weight = self.weight().detach().to("cpu", torch.float32)
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise AdapterMismatchError(
                f"{peft_type} on {self.name}",
                f"the base weight is {tuple(weight.shape)}, not "
                f"{(self.out_features, self.in_features)}",
                "pass the weight as (outputs, inputs)",
            )
        return weight

    def float_bias(self, peft_type: str) -> torch.Tensor | None:
        """The bias, float32 `(N,)`; None without one.

        Raises:
            AdapterUnsupportedError: neither weight nor bias is to be had, so that None might just
                mean that nobody looked, and `peft_type` needs to know.
        """
        if self.bias is not None:
            return self.bias.detach().to("cpu", torch.float32)
        if self.weight is None:
            raise self._not_at_hand(peft_type, "bias")
        return None

    def _not_at_hand(self, peft_type: str, what: str) -> AdapterUnsupportedError:
        return AdapterUnsupportedError(
            f"{peft_type} on {self.name}",
            f"needs the base {what}, which is not at hand here",
            "load it beside the base model",
        )


def checked(
    tensors: Mapping[str, torch.Tensor], expected: Shapes, base: BaseLinear
) -> dict[str, torch.Tensor]:
    """The tensors, detached, if they are the expected ones: no fewer, no more, no other shapes.

    Raises:
        AdapterFormatError: one is missing, or one would be left unused.
        AdapterMismatchError: one has another shape than this linear and these settings give it.
        AdapterUnsupportedError: one is neither float32, float16 nor bfloat16.
    """
    subject = f"adapter on {base.name}"
    missing, unused = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unused:
        reasons = [
            f"{what} {', '.join(sorted(names))}"
            for what, names in (("lacks", missing), ("has no use for", unused))
            if names
        ]
        raise AdapterFormatError(subject, " and ".join(reasons), "save the adapter with PEFT again")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise AdapterMismatchError(
                subject,
                f"{name} is {tuple(tensors[name].shape)}, and {shape} fits linear and config",
                "load it on the base model that it was trained on",
            )
        if tensors[name].dtype not in _DTYPES:
            raise AdapterUnsupportedError(
                subject,
                f"{name} is {tensors[name].dtype}",
                "store it as float32, float16 or bfloat16",
            )
    return {name: tensors[name].detach() for name in expected}


def product_serves(rank: int, base: BaseLinear) -> bool:
    """Whether a product of this rank is within the limit and cheaper than a dense change.

    It takes rank * (N + K) multiplications a row, a dense change N * K.
    """
    width = base.in_features + base.out_features
    return rank <= base.max_rank and rank * width < base.in_features * base.out_features
