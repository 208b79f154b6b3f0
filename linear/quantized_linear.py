"""A linear as a quantised checkpoint holds it, before a kernel takes its weight over."""

from __future__ import annotations

import torch
from torch import nn

from ..core.errors import WrapError
from ..core.scheme import LinearScheme
from .checkpoint_module import CheckpointModule
from .contract import InputContract
from .quantized_weight import QuantizedWeight


class QuantizedLinear(CheckpointModule):
    """Codes, scales and bias of one linear; `wrap` gives it a kernel.

    Args:
        name: full name in the model.
        weight: its codes and scales, checked.
        bias: (N,), or None.
        scheme: of the checkpoint.
        contract: key (without layout) and static scales of its input.
        dtype: dtype of the activations.
    """

    def __init__(
        self,
        name: str,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        scheme: LinearScheme,
        contract: InputContract,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(name, dtype)
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.scheme = scheme
        self.contract = contract
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._weight: QuantizedWeight | None = weight

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.quantized_weight().codes.device

    @property
    def weight(self) -> torch.Tensor:
        """A stand-in of the weight's shape and dtype, for code that asks for those."""
        return torch.empty((self.out_features, self.in_features), dtype=self.dtype, device="meta")

    def quantized_weight(self) -> QuantizedWeight:
        """Codes and scales.

        Raises:
            WrapError: a kernel has taken them.
        """
        if self._weight is None:
            raise WrapError(self.name, "its weight was taken by a kernel", "unwrap the model first")
        return self._weight

    def release(self) -> QuantizedWeight:
        """Hand the weight over and keep nothing of it."""
        weight = self.quantized_weight()
        self._weight = None
        return weight

    def restore(self, weight: QuantizedWeight) -> None:
        """Take the weight back."""
        self._weight = weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Not served: only a kernel can multiply.

        Raises:
            WrapError: always.
        """
        raise WrapError(
            self.name, "holds quantised codes and no kernel yet", "call branchline.wrap(model)"
        )

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"
