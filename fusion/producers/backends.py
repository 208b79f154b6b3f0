"""What all Triton and all C producers have in common: their predicates."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch

from .base import ACCEPTED, ProducerRequest, StaticCodesProducer, Verdict
from .rows import check_activations, name

_FIRST_WITH_FLOAT8E4NV = (8, 9)


class KernelProducer(StaticCodesProducer):
    """A producer with kernels of its own, which compute bfloat16 only.

    Attributes:
        kernels: what to call them in a reason.
    """

    kernels: ClassVar[str]

    def supports(self, request: ProducerRequest) -> Verdict:
        """The device and the dtype, known when a model is wrapped."""
        if request.dtype != torch.bfloat16:
            return Verdict(
                False, f"{self.kernels} compute bfloat16, the model is {name(request.dtype)}"
            )
        return self.supports_platform(request)

    def supports_platform(self, request: ProducerRequest) -> Verdict:
        """Whether the kernels run on that platform."""
        raise NotImplementedError

    def accepts(self, inputs: tuple[torch.Tensor, ...]) -> Verdict:
        """The device of the first input, then everything else about them."""
        verdict = self.accepts_device(inputs[0].device.type)
        return self.accepts_tensors(inputs) if verdict.ok else verdict

    def accepts_device(self, device_type: str) -> Verdict:
        """Whether the kernels can read a tensor there."""
        raise NotImplementedError

    def accepts_tensors(self, inputs: tuple[torch.Tensor, ...]) -> Verdict:
        """Dtypes, shapes and strides; every input is an activation unless overridden."""
        return check_activations(self.kernels, inputs)


class NativeProducer(KernelProducer):
    """A producer over the C kernels."""

    name = "native"
    kernels = "the C kernels"

    def supports_platform(self, request: ProducerRequest) -> Verdict:
        """The CPU, where the library was built."""
        platform = request.platform
        verdict = self.accepts_device(platform.device_type)
        if verdict.ok and platform.native_isa is None:
            return Verdict(False, f"the C kernels are absent: {platform.native_reason}")
        return verdict

    def accepts_device(self, device_type: str) -> Verdict:
        """The CPU only."""
        if device_type == "cpu":
            return ACCEPTED
        return Verdict(False, f"the C kernels run on the cpu, the activation is on {device_type}")


class TritonProducer(KernelProducer):
    """A producer over Triton kernels."""

    name = "triton"
    kernels = "the triton kernels"

    def supports_platform(self, request: ProducerRequest) -> Verdict:
        """A CUDA device with float8e4nv; the CPU in Triton's interpreter."""
        platform = request.platform
        if platform.triton_version is None:
            return Verdict(False, "the triton kernel needs triton, which is not installed")
        if platform.device_type == "cpu" and platform.interpreted:
            return ACCEPTED
        if platform.device_type != "cuda" or platform.capability is None:
            return Verdict(
                False, f"the triton kernel runs on cuda, the activation is on {platform}"
            )
        if platform.capability < _FIRST_WITH_FLOAT8E4NV:
            return Verdict(
                False,
                "the triton kernel needs sm_89 or later for float8e4nv, the device is "
                f"sm_{platform.capability[0]}{platform.capability[1]}",
            )
        return ACCEPTED

    def accepts_device(self, device_type: str) -> Verdict:
        """A CUDA device; the CPU in Triton's interpreter."""
        if device_type == "cuda" or (device_type == "cpu" and _interpreted()):
            return ACCEPTED
        return Verdict(False, f"the triton kernel runs on cuda, the activation is on {device_type}")


@functools.cache
def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
