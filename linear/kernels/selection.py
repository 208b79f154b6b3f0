"""The kernels in order of preference, and the choice among them with every reason kept."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import KernelUnavailableError
from ...core.platform import Platform
from ...core.selection import Rejection, Verdict
from .base import LinearConfig, QuantizedKernel
from .emulated import EmulatedLinear
from .native_fp8 import NativeFp8Linear, NativeW8A16Linear
from .torch_scaled import TorchScaledLinear
from .triton.fp8 import TritonBlockScaledLinear, TritonRowwiseLinear
from .w8a16 import W8A16Linear

#: The first that runs is chosen.
KERNELS: tuple[type[QuantizedKernel], ...] = (
    TorchScaledLinear,
    TritonBlockScaledLinear,
    TritonRowwiseLinear,
    NativeFp8Linear,
    EmulatedLinear,
    NativeW8A16Linear,
    W8A16Linear,
)


@dataclass(frozen=True)
class KernelSelection:
    """The outcome of a choice.

    Attributes:
        kernel: the chosen class.
        rejected: candidates before it, each with its reason.
    """

    kernel: type[QuantizedKernel]
    rejected: tuple[Rejection, ...] = ()


def kernel_names() -> tuple[str, ...]:
    """What `force` may name."""
    return tuple(kernel.name for kernel in KERNELS)


def select_kernel(
    config: LinearConfig, platform: Platform, force: str | None = None, subject: str = "linear"
) -> KernelSelection:
    """The first kernel that runs on `platform` and implements `config`; pure.

    Args:
        config: the linear.
        platform: facts about the device.
        force: name of the only kernel that may be chosen.
        subject: the layer, for messages.

    Raises:
        KernelUnavailableError: none runs, or `force` names one that is unknown or cannot (I14).
    """
    if force is not None and force not in kernel_names():
        raise KernelUnavailableError(
            f"kernel {force!r}", "is unknown", f"choose one of {', '.join(kernel_names())}"
        )
    rejected: list[Rejection] = []
    for kernel in KERNELS:
        verdict = _verdict(kernel, config, platform, force)
        if verdict.ok:
            return KernelSelection(kernel, tuple(rejected))
        rejected.append(Rejection(kernel.name, verdict.reason))
    wanted = [r for r in rejected if force in (None, r.name)]
    reasons = "; ".join(f"{r.name}: {r.reason}" for r in wanted)
    raise KernelUnavailableError(
        f"{subject} ({config.scheme})",
        f"no kernel can serve it on {platform}: {reasons}",
        "drop the forced kernel: linear_kernel= (command line: --linear-kernel)"
        if force
        else "choose another scheme, quant= (command line: --quant), or leave the layer out with "
        "ignore= (command line: --ignore)",
    )


def _verdict(
    kernel: type[QuantizedKernel], config: LinearConfig, platform: Platform, force: str | None
) -> Verdict:
    if force is not None and kernel.name != force:
        return Verdict(False, f"{force!r} was forced")
    return kernel.serves(config, platform)
