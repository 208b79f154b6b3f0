"""Experts as a quantised checkpoint holds them, before kernels take their weights over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...core.errors import WrapError
from ...core.scheme import LinearScheme
from ..checkpoint_module import CheckpointModule
from ..contract import InputContract
from .form import ExpertsForm
from .weight import ExpertsWeight


class QuantizedExperts(CheckpointModule):
    """Codes, scales and biases of a layer's experts; `wrap` gives them kernels.

    Args:
        name: full name in the model.
        form: how they compute; their weights lie as (E, N, K), gates before ups.
        original: the model's own module, whose parameters may lie on the meta device: what the
            activation between the projections is.
        weights: codes and scales by projection, checked.
        biases: (E, N) by projection, or None.
        schemes: of the checkpoint, by projection.
        contracts: key (without layout) and static scale of the input, by projection.
        dtype: of the activations.
    """

    def __init__(
        self,
        name: str,
        form: ExpertsForm,
        original: nn.Module,
        weights: Mapping[str, ExpertsWeight],
        biases: Mapping[str, torch.Tensor | None],
        schemes: Mapping[str, LinearScheme],
        contracts: Mapping[str, InputContract],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(name, dtype)
        self.form = form
        # In a tuple, so that its parameters do not become this one's.
        self._original = (original,)
        self.biases = dict(biases)
        self.schemes = dict(schemes)
        self.contracts = dict(contracts)
        self._weights: dict[str, ExpertsWeight] = dict(weights)

    @property
    def original(self) -> nn.Module:
        """The model's own module."""
        return self._original[0]

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.quantized_weight(self.form.down_name).device

    def quantized_weight(self, projection: str) -> ExpertsWeight:
        """Codes and scales of a projection.

        Raises:
            WrapError: a kernel has taken them.
        """
        weight = self._weights.get(projection)
        if weight is None:
            raise WrapError(
                f"{self.name}.{projection}",
                "its weights were taken by a kernel",
                "unwrap the model first",
            )
        return weight

    def release(self, projection: str) -> ExpertsWeight:
        """Hand the weights of a projection over and keep nothing of them."""
        weight = self.quantized_weight(projection)
        del self._weights[projection]
        return weight

    def restore(self, projection: str, weight: ExpertsWeight) -> None:
        """Take the weights of a projection back."""
        self._weights[projection] = weight

    def forward(self, *args: Any) -> torch.Tensor:
        """Not served: only kernels can multiply.

        Raises:
            WrapError: always.
        """
        raise WrapError(
            self.name, "holds quantised codes and no kernels yet", "call branchline.wrap(model)"
        )
