"""The one configuration model; the library's keywords and the command line both come from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import torch
from pydantic import Field, field_validator

from ..core.scheme import SCHEMES, LinearScheme
from ..linear.kernels.selection import kernel_names
from ..policies.policy import make_policy
from .settings import Ignore, Percentile, QuantizeHead, Settings


class Quant(StrEnum):
    """What the linears consume."""

    NONE = "none"
    FP8_STATIC = "fp8-static"
    FP8_DYNAMIC = "fp8-dynamic"
    FP8_BLOCK = "fp8-block"
    FP8_BLOCK_UE8M0 = "fp8-block-ue8m0"
    FP8_WEIGHT_ONLY = "fp8-weight-only"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"

    @property
    def scheme(self) -> LinearScheme | None:
        """Of the linears; None where they stay as they are."""
        return SCHEMES.get(self.value)

    @property
    def calibrated(self) -> bool:
        """Whether inputs have a scale that is measured beforehand."""
        return self.scheme is not None and self.scheme.calibrated


class LoraDtype(StrEnum):
    """Dtype of the adapter slots."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    def resolve(self, model_dtype: torch.dtype) -> torch.dtype:
        """The torch dtype; "auto" is the model's."""
        return model_dtype if self is LoraDtype.AUTO else getattr(torch, self.value)


class WrapConfig(Settings):
    """How a model is wrapped.  Field descriptions are the command line's help."""

    quant: Annotated[
        Quant,
        Field(
            description="How linears are quantised; fp8-static and nvfp4 need calibration "
            "prompts. Not for a checkpoint that is quantised already."
        ),
    ] = Quant.FP8_DYNAMIC
    policy: Annotated[
        str,
        Field(
            description="Where adapters are live: dynamic (raw, unfused), dual (codes, and their "
            "raw rows beside), absorbed (codes and their LoRA shrink); or static (never fuse "
            "where LoRA may be)."
        ),
    ] = "dynamic"
    max_loras: Annotated[
        int, Field(ge=0, description="How many adapters fit at once; 0 switches adapters off.")
    ] = 8
    max_lora_rank: Annotated[
        int, Field(ge=1, le=1024, description="Highest LoRA rank that fits a slot.")
    ] = 16
    lora_dtype: Annotated[
        LoraDtype, Field(description="Dtype of the adapter slots; auto is the model's.")
    ] = LoraDtype.AUTO
    percentile: Percentile = 100.0
    quantize_lm_head: QuantizeHead = False
    ignore: Ignore = ()
    producer: Annotated[
        str | None,
        Field(description="Force one producer (triton, native, eager); refuses if it cannot run."),
    ] = None

    linear_kernel: Annotated[
        str | None,
        Field(
            description="Force one base matmul kernel "
            f"({', '.join(kernel_names())}); refuses if it cannot run."
        ),
    ] = None

    @field_validator("linear_kernel")
    @classmethod
    def _known_kernel(cls, value: str | None) -> str | None:
        if value is not None and value not in kernel_names():
            raise ValueError(f"unknown kernel; choose one of {', '.join(kernel_names())}")
        return value

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        make_policy(value)
        return value
