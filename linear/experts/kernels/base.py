"""What a grouped matmul is, and the values that its choice is made from."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from ....core.errors import ContractError, KernelUnavailableError
from ....core.platform import Platform
from ....core.quant_key import QuantKey
from ....core.quantized_activation import QuantizedActivation, as_quantized_activation
from ....core.scheme import LinearScheme
from ....core.selection import Verdict
from ...contract import InputContract
from ...kernels.base import BaseKernel, LinearConfig, QuantizedKernel
from ...quantizers import quantize_input
from ..pairs import Pairs, combine
from ..weight import ExpertsWeight


class GroupedKernel(BaseKernel):
    """One projection of all experts: weights (E, N, K), each multiplied with its own pairs.

    A pair's bytes depend on its own row and expert alone: neither on who shares its expert, nor on
    how many do.

    Attributes:
        experts: E.
    """

    experts: int

    @abstractmethod
    def apply(
        self,
        x: torch.Tensor | QuantizedActivation,
        pairs: Pairs,
        consumer: str,
        *,
        by_token: bool,
    ) -> torch.Tensor:
        """The base output of every pair.

        Args:
            x: a raw activation, or codes for `contract.key`: (T, K) `by_token`, else (P, K), by
                position.
            pairs: who computes what.
            consumer: name of the layer, for messages.
            by_token: the row of a pair is its token's, else its position's.

        Returns:
            (P, N), by position, in the activation's dtype; rows of pairs that nobody computes are
            not written.  Codes and raw activation give the same bytes.

        Raises:
            QuantKeyMismatchError: codes for another key.
            RawConsumerError: codes for a kernel that takes none, or codes without their scale.
            ContractError: rows or columns that are not these pairs'.
        """

    def combine(self, out: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """What a token's experts make of it, weighted and added up: `pairs.combine`, to the bit.

        Args:
            out: (P, N), by position.
            weights: (T, k), by choice.
            pairs: of the forward.

        Returns:
            float32 (T, N).

        Raises:
            ContractError: rows or weights that are not these pairs'.
        """
        return combine(out, weights, pairs)

    def check_rows(self, shape: torch.Size, pairs: Pairs, consumer: str, *, by_token: bool) -> None:
        """Refuse an input of another shape than (T, K) or (P, K).

        Raises:
            ContractError: it has one.
        """
        wanted = (pairs.tokens if by_token else len(pairs), self.in_features)
        if tuple(shape) != wanted:
            raise ContractError(
                consumer,
                f"takes rows of shape {wanted}, its input has shape {tuple(shape)}",
                "hand it the activation that its router chose experts for",
            )


@dataclass(frozen=True)
class GroupedConfig:
    """Everything a grouped kernel may be chosen by; plain data, so any machine can be imagined.

    Attributes:
        experts: E.
        linear: what each expert's linear is.
    """

    experts: int
    linear: LinearConfig


class QuantizedGroupedKernel(GroupedKernel):
    """A grouped kernel for quantised weights: chosen by predicates, built from codes and scales.

    Args:
        weight: codes and scales of a scheme that `serves` accepted.
        bias: (E, N), or None.
        contract: its key is what `consumes` says.

    Raises:
        KernelUnavailableError: it does not implement this weight and key.
        ScaleError: a static key without its scale.
        ContractError: a bias of another shape.
    """

    def __init__(
        self, weight: ExpertsWeight, bias: torch.Tensor | None, contract: InputContract
    ) -> None:
        self.contract = contract
        self.experts = len(weight)
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._bias = None if bias is None else bias.detach().float()
        self._check(weight)
        self._take(weight)

    def _check(self, weight: ExpertsWeight) -> None:
        subject, key = f"kernel {self.name}", self.contract.key
        for own in weight.experts:
            own.check_shapes(subject)
        expected = (self.experts, self.out_features)
        if self._bias is not None and self._bias.shape != expected:
            raise ContractError(
                subject,
                f"its bias has shape {tuple(self._bias.shape)}, expected {expected}",
                "pass the bias of these experts",
            )
        scheme = LinearScheme(weight.scheme, None if key is None else key.plain())
        config = GroupedConfig(
            self.experts, LinearConfig(self.in_features, self.out_features, scheme)
        )
        verdict = self.can_implement(config)
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
    def can_implement(cls, config: GroupedConfig) -> Verdict:
        """Whether it serves such experts, on a machine that it supports; pure."""

    @classmethod
    def serves(cls, config: GroupedConfig, platform: Platform) -> Verdict:
        """Whether it serves such experts on such a machine: what a choice asks; pure."""
        verdict = cls.is_supported(platform)
        return cls.can_implement(config) if verdict.ok else verdict

    @classmethod
    def consumes(cls, config: GroupedConfig) -> QuantKey | None:
        """The key of the input it takes for such experts, layout and padding included."""
        return config.linear.scheme.input

    @abstractmethod
    def _take(self, weight: ExpertsWeight) -> None:
        """Lay the weights out as the kernel reads them, and keep nothing else of them."""

    @abstractmethod
    def quantized_weight(self) -> ExpertsWeight:
        """The weights it was built from, codes and scales to the bit."""

    @abstractmethod
    def multiply(
        self, x: torch.Tensor | QuantizedActivation, pairs: Pairs, *, by_token: bool
    ) -> torch.Tensor:
        """As `apply`, of codes for `contract.key`, or of a raw activation where that has none."""

    def dequantized(self) -> torch.Tensor:
        return self.quantized_weight().dequantize()

    def bias(self) -> torch.Tensor | None:
        return self._bias

    def apply(
        self,
        x: torch.Tensor | QuantizedActivation,
        pairs: Pairs,
        consumer: str,
        *,
        by_token: bool,
    ) -> torch.Tensor:
        self.check_rows(x.shape, pairs, consumer, by_token=by_token)
        key = self.contract.key
        quantized = as_quantized_activation(x, key, consumer=consumer)
        if quantized is None and key is not None:
            assert isinstance(x, torch.Tensor)
            # Once a token, however many experts read it.
            quantized = quantize_input(x, self.contract, consumer)
        return self.multiply(x if quantized is None else quantized, pairs, by_token=by_token)


class LikeLinearKernel(QuantizedGroupedKernel):
    """A grouped kernel that serves what one of a linear's does, on the same machines.

    Attributes:
        linear: that one.
    """

    linear: type[QuantizedKernel]

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        return cls.linear.is_supported(platform)

    @classmethod
    def can_implement(cls, config: GroupedConfig) -> Verdict:
        return cls.linear.can_implement(config.linear)

    @classmethod
    def consumes(cls, config: GroupedConfig) -> QuantKey | None:
        return cls.linear.consumes(config.linear)
