"""The one configuration model; the library's keywords and the command line both come from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

import torch
from pydantic import Field, field_validator, model_validator

from ..adapters.sources import SourceLimits
from ..adapters.tiers import Eviction, TierLimits
from ..core.scheme import SCHEMES, LinearScheme
from ..linear.kernels.float_selection import FloatKernel
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
            "raw rows beside), absorbed (codes and their LoRA shrink), auto (what costs least, by "
            "what branchline calibrate measured); static (never fuse where LoRA may be); or a "
            "plug-in's. Options follow as name:key=value,..."
        ),
    ] = "dynamic"
    max_loras: Annotated[
        int,
        Field(
            ge=0,
            description="How many adapters fit the device at once, and so one batch; more may be "
            "loaded. 0 switches adapters off.",
        ),
    ] = 8
    max_lora_rank: Annotated[
        int, Field(ge=1, le=1024, description="Highest LoRA rank that fits a slot.")
    ] = 16
    lora_slots: Annotated[
        str | None,
        Field(
            description="Slots of several ranks, in the place of max_loras and max_lora_rank: "
            "rank:count, such as 8:100,64:4."
        ),
    ] = None
    max_cpu_loras: Annotated[
        int | None,
        Field(
            ge=0,
            description="How many adapters host memory keeps, those on the device included; others "
            "are read from disk again. Unset: all.",
        ),
    ] = None
    max_cpu_lora_bytes: Annotated[
        int | None, Field(ge=0, description="How many bytes they may take. Unset: any.")
    ] = None
    eviction: Annotated[
        Eviction,
        Field(
            description="Which idle adapter makes room: lru (used longest ago), lfu (used least "
            "often), priority (lowest priority)."
        ),
    ] = Eviction.LRU
    allowed_roots: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Folders and URLs that adapters may come from, with all that lies below. "
            "Unset: any."
        ),
    ] = None
    max_adapter_bytes: Annotated[
        int, Field(ge=1, description="Most bytes that the files of one adapter may have.")
    ] = SourceLimits.max_adapter_bytes
    allow_base_mismatch: Annotated[
        bool,
        Field(description="Load adapters that name another base model than this one, with a note."),
    ] = False
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

    float_kernel: Annotated[
        FloatKernel,
        Field(
            description="What multiplies unquantised linears, the output head above all, and experts: torch; "
            "native (the C kernels, for bfloat16 on a CPU; refuses if they cannot run); auto "
            "(native where it runs)."
        ),
    ] = FloatKernel.TORCH

    @property
    def tier_limits(self) -> TierLimits:
        """How many adapters fit where."""
        slots = {self.max_lora_rank: self.max_loras} if self.max_loras else {}
        if self.lora_slots is not None:
            slots = dict(_rank_and_count(part) for part in self.lora_slots.split(","))
        return TierLimits(slots, self.max_cpu_loras, self.max_cpu_lora_bytes, self.eviction)

    @property
    def for_wrap(self) -> dict[str, Any]:
        """What `wrap` is given: what was set, and the defaults that a derived class has of its own.

        The others stay unset, for `wrap` refuses a setting that is set and would have no effect.
        """
        return {
            name: value
            for name, field in WrapConfig.model_fields.items()
            if (value := getattr(self, name)) != field.default or name in self.model_fields_set
        }

    @property
    def source_limits(self) -> SourceLimits:
        """What adapters may come from, and how large they may be."""
        return SourceLimits(self.allowed_roots, self.max_adapter_bytes)

    @field_validator("lora_slots", mode="before")
    @classmethod
    def _slots_as_text(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return ",".join(f"{rank}:{count}" for rank, count in value.items())
        return value

    @field_validator("lora_slots")
    @classmethod
    def _known_slots(cls, value: str | None) -> str | None:
        if value is None:
            return None
        slots = [_rank_and_count(part) for part in value.split(",")]
        if len(dict(slots)) < len(slots):
            raise ValueError("names a rank twice")
        return ",".join(f"{rank}:{count}" for rank, count in sorted(slots))

    @model_validator(mode="after")
    def _slots_once(self) -> Self:
        both = {"max_loras", "max_lora_rank"} & self.model_fields_set
        if self.lora_slots is not None and both:
            raise ValueError(f"lora_slots stands in the place of {' and '.join(sorted(both))}")
        return self

    @field_validator("allowed_roots", mode="before")
    @classmethod
    def _one_root(cls, value: object) -> object:
        return (value,) if isinstance(value, str | os.PathLike) else value

    @field_validator("allowed_roots")
    @classmethod
    def _sound_roots(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        SourceLimits(value)
        return value

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


def _rank_and_count(text: str) -> tuple[int, int]:
    rank, colon, count = (part.strip() for part in text.partition(":"))
    if not colon or not (rank.isascii() and rank.isdigit() and count.isascii() and count.isdigit()):
        raise ValueError(f"{text!r} is no rank:count, such as 8:100")
    if not 1 <= int(rank) <= 1024 or int(count) < 1:
        raise ValueError(f"{text!r} has a rank outside of 1 to 1024, or a count below 1")
    return int(rank), int(count)
