"""What a base matmul kernel is, and the values that its choice is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from ...core.errors import ContractError, KernelUnavailableError
from ...core.platform import Platform
from ...core.quant_key import QuantKey, ScaleLayout
from ...core.quantized_activation import QuantizedActivation, as_quantized_activation
from ...core.scheme import LinearScheme
from ...core.selection import Rejection, Verdict
from ..contract import InputContract
from ..quantized_weight import QuantizedWeight
from ..quantizers import quantize_input


@dataclass(frozen=True)
class LinearConfig:
    """Everything a kernel may be chosen by; plain data, so any machine can be imagined.

    Attributes:
        in_features: K.
        out_features: N.
        scheme: how its weight and its input are quantised.
    """

    in_features: int
    out_features: int
    scheme: LinearScheme


def block_input(key: QuantKey) -> QuantKey:
    """A key of block scales as every block kernel of a GPU reads them.

    One layout for all of them, so that a site whose linears get different kernels is still fused:
    group after group, and rows in fours, which put each group's scales on 16 bytes.
    """
    return replace(key, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=4)


class BaseKernel(ABC):
    """Base weights, and the multiplication with them.

    Attributes:
        name: as the audit shows it.
        emulated: arithmetic of the codes is exact, but memory or time are not what the format
            promises; the audit says so (I14).
        contract: the quantised input it consumes, and its static scale.
        in_features: K.
        out_features: N.
        rejected: kernels that were preferred to it, each with the reason why it was not chosen.
    """

    name: str
    emulated: bool = False
    rejected: tuple[Rejection, ...] = ()
    contract: InputContract
    in_features: int
    out_features: int

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weight takes in memory, scales included."""

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """float32 (N, K), of experts (E, N, K), a copy: the weight that it multiplies with."""

    @abstractmethod
    def bias(self) -> torch.Tensor | None:
        """The bias, (N,) or (E, N), or None."""


class LinearKernel(BaseKernel):
    """One base linear: its weight (N, K), and the multiplication with it."""

    def float_weight(self) -> torch.Tensor | None:
        """The unquantised weight, as the model stores it, where the kernel keeps it."""
        return None

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


class QuantizedKernel(LinearKernel):
    """A kernel for a quantised weight: chosen by predicates, built from codes and scales.

    Args:
        weight: codes and scales of a scheme that `can_implement` accepted.
        bias: (N,), or None.
        contract: its key is what `consumes` says.

    Raises:
        KernelUnavailableError: it does not implement this weight and key.
        ScaleError: a static key without its scale.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, contract: InputContract
    ) -> None:
        self.contract = contract
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._bias = None if bias is None else bias.detach().float()
        self._check(weight)
        self._take(weight)

    def _check(self, weight: QuantizedWeight) -> None:
        subject, key = f"kernel {self.name}", self.contract.key
        plain = None if key is None else key.plain()
        scheme = LinearScheme(weight.scheme, plain)
        weight.check_shapes(subject)
        if self._bias is not None and self._bias.shape != (self.out_features,):
            raise ContractError(
                subject,
                f"its bias has shape {tuple(self._bias.shape)}, the weight {self.out_features} "
                "output channels",
                "pass the bias of this linear",
            )
        verdict = self.can_implement(LinearConfig(self.in_features, self.out_features, scheme))
        if verdict.ok and not self.in_features:
            verdict = Verdict(False, "the weight has no columns")
        if not verdict.ok:
            raise KernelUnavailableError(subject, verdict.reason, "choose another kernel")
        if key is not None and key.static:
            self.contract.static_scale(subject)
        if key is not None and key.global_scale:
            self.contract.required_global_scale(subject)

    @classmethod
    @abstractmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Whether it runs on such a machine at all; pure."""

    @classmethod
    @abstractmethod
    def can_implement(cls, config: LinearConfig) -> Verdict:
        """Whether it serves such a linear, on a machine that it supports; pure."""

    @classmethod
    def serves(cls, config: LinearConfig, platform: Platform) -> Verdict:
        """Whether it serves such a linear on such a machine: what a choice asks; pure.

        A kernel whose devices depend on the scheme asks for more than both predicates.
        """
        verdict = cls.is_supported(platform)
        return cls.can_implement(config) if verdict.ok else verdict

    @classmethod
    def consumes(cls, config: LinearConfig) -> QuantKey | None:
        """The key of the input it takes for such a linear, layout and padding included."""
        return config.scheme.input

    @abstractmethod
    def _take(self, weight: QuantizedWeight) -> None:
        """Lay the weight out as the kernel reads it, and keep nothing else of it."""

    @abstractmethod
    def quantized_weight(self) -> QuantizedWeight:
        """The weight it was built from, codes and scales to the bit."""

    def dequantized(self) -> torch.Tensor:
        return self.quantized_weight().dequantize()

    def bias(self) -> torch.Tensor | None:
        return self._bias

    def check_width(self, shape: torch.Size, consumer: str) -> None:
        """Refuse an input of another width than K.

        Raises:
            ContractError: it has one.
        """
        if shape[-1:] != (self.in_features,):
            raise ContractError(
                consumer,
                f"takes {self.in_features} columns, its input has shape {tuple(shape)}",
                "hand it the activation of its own site",
            )


class CodesKernel(QuantizedKernel):
    """A kernel that multiplies codes: of a producer, or those it makes of a raw activation."""

    @abstractmethod
    def multiply(self, x: QuantizedActivation) -> torch.Tensor:
        """(..., N) in the activation's dtype, of codes for `contract.key`."""

    def apply(self, x: torch.Tensor | QuantizedActivation, consumer: str) -> torch.Tensor:
        self.check_width(x.shape, consumer)
        quantized = as_quantized_activation(x, self.contract.key, consumer=consumer)
        if quantized is None:
            assert isinstance(x, torch.Tensor)
            quantized = quantize_input(x, self.contract, consumer)
        return self.multiply(quantized)
