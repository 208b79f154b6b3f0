"""What a base matmul kernel is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ...core.quantized_activation import QuantizedActivation
from ..contract import InputContract


class LinearKernel(ABC):
    """One base linear: weights, and the multiplication with them.

    Attributes:
        name: as the audit shows it.
        emulated: arithmetic of the codes is exact, but memory or time are not what the format
            promises; the audit says so (I14).
        contract: the quantised input it consumes, and its static scale.
        in_features: K.
        out_features: N.
    """

    name: str
    emulated: bool = False
    contract: InputContract
    in_features: int
    out_features: int

    def float_weight(self) -> torch.Tensor | None:
        """The unquantised weight, as the model stores it, where the kernel keeps it."""
        return None

    @abstractmethod
    def bias(self) -> torch.Tensor | None:
        """The bias, (N,), or None."""

    @abstractmethod
    def apply(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> torch.Tensor:
        """The base output.

        Args:
            x: (..., K): a raw activation, or codes for `contract.key`.
            consumer: name of the layer, for messages.

        Returns:
            (..., N) in the activation's dtype.  Codes and raw activation give the same bytes.

        Raises:
            QuantKeyMismatchError: codes for another key.
            RawConsumerError: codes for a kernel that takes none, or codes without their scale.
        """
