"""What all Triton and all C producers have in common: their predicates."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import ClassVar

import torch

from ...core.oracle import ActivationSemantics, Semantics
from ...core.oracle.norm import name_inputs
from ...core.route import Route
from ...core.selection import ACCEPTED, Verdict
from ...linear.outputs import Outputs, new_outputs
from ...linear.rows import check_activations, check_vector, name
from .base import Emission, Produced, Producer, ProducerRequest, check_rank

_FIRST_WITH_FLOAT8E4NV = (8, 9)
_FIRST_WITH_E2M1 = (10, 0)
#: Columns of a group that a tile of the Triton kernels holds, without and with a shrink beside.
MAX_GROUP = 1024
MAX_ABSORBED_GROUP = 128
_LORA_DTYPES = (torch.bfloat16, torch.float32)


class KernelProducer(Producer):
    """A producer with kernels of its own, which compute bfloat16 only.

    Attributes:
        kernels: what to call them in a reason.
    """

    kernels: ClassVar[str]

    def supports(self, request: ProducerRequest) -> Verdict:
        """The dtype, the rank to absorb and the device, known when a plan is made."""
        if request.dtype != torch.bfloat16:
            return Verdict(
                False, f"{self.kernels} compute bfloat16, the model is {name(request.dtype)}"
            )
        if request.route == Route.ABSORBED:
            verdict = _supports_shrink(self.kernels, request)
            if not verdict.ok:
                return verdict
        return self.supports_platform(request)

    @abstractmethod
    def supports_platform(self, request: ProducerRequest) -> Verdict:
        """Whether the kernels run on that platform."""

    def accepts(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> Verdict:
        """The device of the first input, then everything else about them."""
        verdict = self.accepts_device(inputs[0].device.type)
        return check_inputs(self.kernels, semantics, inputs) if verdict.ok else verdict

    @abstractmethod
    def accepts_device(self, device_type: str) -> Verdict:
        """Whether the kernels can read a tensor there."""

    def produce(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> Produced:
        """One launch over buffers allocated here."""
        title = self.title(semantics, emission)
        outputs = new_outputs(
            inputs[0], emission.contract, title, raw=emission.raw, shrinks=emission.shrinks
        )
        residual = self.launch(semantics, inputs, outputs)
        return Produced(outputs.activation(title), residual)

    @abstractmethod
    def launch(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], outputs: Outputs
    ) -> torch.Tensor | None:
        """Fill `outputs`; returns the new residual of a norm that adds one."""


def check_inputs(kernels: str, semantics: Semantics, inputs: tuple[torch.Tensor, ...]) -> Verdict:
    """Whether kernels that compute bfloat16 rows can read the inputs of `semantics`."""
    if isinstance(semantics, ActivationSemantics):
        return check_activations(kernels, dict(zip(("gate", "up"), inputs, strict=False)))
    named = name_inputs(semantics, inputs)
    activations = {"the input": named.x}
    if named.residual is not None:
        activations["the residual"] = named.residual
    verdict = check_activations(kernels, activations)
    for what, vector in (("weight", named.weight), ("bias", named.bias)):
        if verdict.ok and vector is not None:
            verdict = check_vector(kernels, what, named.x, vector)
    return verdict


def _supports_shrink(kernels: str, request: ProducerRequest) -> Verdict:
    verdict = check_rank(request)
    if not verdict.ok:
        return verdict
    if request.lora_dtype not in _LORA_DTYPES:
        served = " and ".join(map(name, _LORA_DTYPES))
        held = "unknown" if request.lora_dtype is None else name(request.lora_dtype)
        return Verdict(False, f"{kernels} absorb {served} adapters, the slots are {held}")
    return ACCEPTED


def _supports_groups(request: ProducerRequest) -> Verdict:
    """Tiles of the Triton kernels are powers of two, and hold whole groups."""
    size = request.key.granularity.size
    most = MAX_ABSORBED_GROUP if request.route == Route.ABSORBED else MAX_GROUP
    if size <= most and size & (size - 1) == 0:
        return ACCEPTED
    return Verdict(
        False,
        f"the triton kernels take groups of a power of two up to {most} columns, the key's have "
        f"{size}",
    )


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
        """A CUDA device that has the conversions; the CPU in Triton's interpreter."""
        platform = request.platform
        if platform.triton_version is None:
            return Verdict(False, "the triton kernels need triton, which is not installed")
        verdict = _supports_groups(request)
        if not verdict.ok:
            return verdict
        if platform.device_type == "cpu" and platform.interpreted:
            return ACCEPTED
        if platform.device_type != "cuda" or platform.capability is None:
            return Verdict(
                False, f"the triton kernels run on cuda, the activation is on {platform}"
            )
        fp4 = request.key.epilogue == "nvfp4"
        first = _FIRST_WITH_E2M1 if fp4 else _FIRST_WITH_FLOAT8E4NV
        if platform.capability < first:
            return Verdict(
                False,
                f"the triton kernels need {_sm(first)} or later for "
                f"{'e2m1' if fp4 else 'float8e4nv'}, the device is {_sm(platform.capability)}",
            )
        return ACCEPTED

    def accepts_device(self, device_type: str) -> Verdict:
        """A CUDA device; the CPU in Triton's interpreter."""
        if device_type == "cuda" or (device_type == "cpu" and _interpreted()):
            return ACCEPTED
        return Verdict(False, f"the triton kernels run on cuda, the activation is on {device_type}")


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


@functools.cache
def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
