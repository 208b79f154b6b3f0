"""The grouped kernels in order of preference, and the choice among them with every reason kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....core.errors import KernelUnavailableError
from ....core.platform import Platform
from ....core.scheme import LinearScheme
from ....core.selection import Rejection, Verdict
from ...contract import InputContract
from ...kernels.base import LinearConfig
from ..weight import ExpertsWeight
from .base import GroupedConfig, QuantizedGroupedKernel
from .each import EmulatedExperts, W8A16Experts
from .native_fp8 import NativeFp8Experts, NativeW8A16Experts
from .torch_grouped import TorchScaledExperts
from .triton.fp8 import TritonBlockScaledExperts, TritonRowwiseExperts

#: The first that runs is chosen.
GROUPED_KERNELS: tuple[type[QuantizedGroupedKernel], ...] = (
    TritonBlockScaledExperts,
    TritonRowwiseExperts,
    NativeFp8Experts,
    EmulatedExperts,
    NativeW8A16Experts,
    W8A16Experts,
    # Serves nothing that those before it do not: only who forces it gets it.
    TorchScaledExperts,
)


@dataclass(frozen=True)
class GroupedSelection:
    """The outcome of a choice.

    Attributes:
        kernel: the chosen class.
        rejected: candidates before it, each with its reason.
    """

    kernel: type[QuantizedGroupedKernel]
    rejected: tuple[Rejection, ...] = ()


def grouped_kernel_names() -> tuple[str, ...]:
    """What `force` may name."""
    return tuple(kernel.name for kernel in GROUPED_KERNELS)


def select_grouped_kernel(
    config: GroupedConfig, platform: Platform, force: str | None = None, subject: str = "experts"
) -> GroupedSelection:
    """The first kernel that runs on `platform` and implements `config`; pure.

    Args:
        config: the experts.
        platform: facts about the device.
        force: name of the only kernel that may be chosen; those of linears and of experts that do
            the same are called the same.
        subject: the layer, for messages.

    Raises:
        KernelUnavailableError: none runs, or the forced one cannot (I14).
    """
    rejected: list[Rejection] = []
    for kernel in GROUPED_KERNELS:
        verdict = _verdict(kernel, config, platform, force)
        if verdict.ok:
            return GroupedSelection(kernel, tuple(rejected))
        rejected.append(Rejection(kernel.name, verdict.reason))
    wanted = [r for r in rejected if force in (None, r.name)]
    reasons = "; ".join(f"{r.name}: {r.reason}" for r in wanted)
    if not reasons:
        reasons = f"{force} has no form for experts ({', '.join(grouped_kernel_names())} have one)"
    raise KernelUnavailableError(
        f"{subject} ({config.experts} experts, {config.linear.scheme})",
        f"no kernel can serve it on {platform}: {reasons}",
        "drop the forced kernel: linear_kernel= (command line: --linear-kernel)"
        if force
        else "choose another scheme, quant= (command line: --quant), or leave the layer out with "
        "ignore= (command line: --ignore)",
    )


def _verdict(
    kernel: type[QuantizedGroupedKernel],
    config: GroupedConfig,
    platform: Platform,
    force: str | None,
) -> Verdict:
    if force is not None and kernel.name != force:
        return Verdict(False, f"{force!r} was forced")
    return kernel.serves(config, platform)


def build_grouped_kernel(
    subject: str,
    weight: ExpertsWeight,
    bias: torch.Tensor | None,
    contract: InputContract,
    platform: Platform,
    force: str | None = None,
) -> QuantizedGroupedKernel:
    """The first kernel that runs on `platform` and serves the experts `subject`.

    Args:
        subject: name of the layer.
        weight: codes and scales of its experts.
        bias: (E, N), or None.
        contract: the key of its input without layout (None: unquantised), and its scales.
        platform: facts about the device of `weight`.
        force: name of the only kernel that may be chosen.

    Raises:
        KernelUnavailableError: none runs, or the forced one cannot (I14).
        ScaleError: a scale that the key needs is missing.
    """
    scheme = LinearScheme(weight.scheme, contract.key)
    config = GroupedConfig(
        len(weight), LinearConfig(weight.in_features, weight.out_features, scheme)
    )
    chosen = select_grouped_kernel(config, platform, force, subject)
    key = chosen.kernel.consumes(config)
    if key is None:
        taken = InputContract(None)
    else:
        taken = InputContract(key, contract.scale, contract.global_scale)
    kernel = chosen.kernel(weight, bias, taken)
    kernel.rejected = chosen.rejected
    return kernel
