"""The kernel of a linear that stays unquantised: the model's own multiplication, or C."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...core.errors import KernelUnavailableError
from ...core.platform import Platform
from ...core.selection import Rejection
from ..weights import LinearModule
from .base import LinearKernel
from .float import FloatLinear
from .native_bf16 import FloatLinearConfig, NativeBf16Linear


class FloatKernel(StrEnum):
    """What multiplies unquantised linears.

    `torch`: the model's own module.  `native`: the C kernels.  `auto`: those where they run, else
    the module.
    """

    TORCH = "torch"
    NATIVE = "native"
    AUTO = "auto"


@dataclass(frozen=True)
class FloatSelection:
    """The outcome of a choice.

    Attributes:
        kernel: the chosen class.
        rejected: what was preferred to it, with the reason.
    """

    kernel: type[FloatLinear] | type[NativeBf16Linear]
    rejected: tuple[Rejection, ...] = ()


def select_float_kernel(
    config: FloatLinearConfig, platform: Platform, choice: FloatKernel, subject: str = "linear"
) -> FloatSelection:
    """The kernel that `choice` means for such a linear on `platform`; pure.

    Args:
        config: the linear.
        platform: facts about the device of its weight.
        choice: what was asked for.
        subject: the layer, for messages.

    Raises:
        KernelUnavailableError: the C kernels were asked for and cannot serve it (I14).
    """
    if choice is FloatKernel.TORCH:
        return FloatSelection(FloatLinear)
    verdict = NativeBf16Linear.serves(config, platform)
    if verdict.ok:
        return FloatSelection(NativeBf16Linear)
    if choice is FloatKernel.NATIVE:
        raise KernelUnavailableError(
            f"{subject} (unquantised)",
            f"{NativeBf16Linear.name} cannot serve it on {platform}: {verdict.reason}",
            "wrap with float_kernel='auto' (command line: --float-kernel auto)",
        )
    return FloatSelection(FloatLinear, (Rejection(NativeBf16Linear.name, verdict.reason),))


def build_float_kernel(
    subject: str,
    module: LinearModule,
    platform: Platform,
    choice: FloatKernel,
    *,
    weight_read: bool,
    keeps_weight: bool,
) -> FloatLinear | NativeBf16Linear:
    """The kernel of the unquantised layer `subject`.

    Args:
        subject: name of the layer.
        module: the model's own.
        platform: facts about the device of its weight.
        choice: what was asked for.
        weight_read: the model reads the weight itself.
        keeps_weight: something else in the model has this weight too.

    Raises:
        KernelUnavailableError: the C kernels were asked for and cannot serve it (I14).
    """
    config = FloatLinearConfig.of(module, weight_read=weight_read)
    chosen = select_float_kernel(config, platform, choice, subject)
    if chosen.kernel is NativeBf16Linear:
        return NativeBf16Linear(module, keeps_weight=keeps_weight)
    kernel = FloatLinear(module)
    kernel.rejected = chosen.rejected
    return kernel


def give_weight_back(kernel: LinearKernel) -> None:
    """Let the module behind `kernel` have its own weight, where the kernel took it."""
    if isinstance(kernel, NativeBf16Linear):
        kernel.give_back()
