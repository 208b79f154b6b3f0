"""Which low-rank kernel is chosen, with the reason for each that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from branchline.adapters.kernels.base import LowRankConfig
from branchline.adapters.kernels.selection import select_low_rank
from branchline.core.platform import Platform

CPU = Platform("cpu", None, "2.13.0", "3.6.0", "avx512")
GPU = Platform("cuda", (9, 0), "2.13.0", "3.6.0", "avx512")
LORA = LowRankConfig(torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("platform", "config", "name"),
    [
        (CPU, LORA, "native"),
        (GPU, LORA, "triton"),
        (replace(CPU, interpreted=True, native_isa=None), LORA, "triton"),
        (replace(CPU, native_isa=None), LORA, "eager"),
        (GPU, LowRankConfig(torch.float64, 64), "eager"),
    ],
)
def test_choice(platform, config, name):
    assert select_low_rank(config, platform).kernel.name == name


@pytest.mark.parametrize(
    ("platform", "config", "kernel", "reason"),
    [
        (GPU, LORA, "native", "run on a CPU"),
        (replace(CPU, native_isa=None, native_reason="not built"), LORA, "native", "not built"),
        (CPU, LowRankConfig(torch.float64, 8), "native", "the slots are float64"),
        (CPU, LowRankConfig(torch.bfloat16, 2000), "native", "not 2000"),
        (CPU, LowRankConfig(torch.bfloat16, 2000), "triton", "NVIDIA"),
        (replace(GPU, triton_version=None), LORA, "triton", "not installed"),
        (replace(GPU, triton_version="3.1.0"), LORA, "triton", "3.1.0 is installed"),
        (replace(GPU, capability=(7, 5)), LORA, "triton", "sm_80"),
        (replace(GPU, hip=True, capability=None), LORA, "triton", "rocm"),
        (GPU, LowRankConfig(torch.float64, 8), "triton", "the slots are float64"),
    ],
)
def test_reasons(platform, config, kernel, reason):
    rejected = {r.name: r.reason for r in select_low_rank(config, platform).rejected}
    assert reason in rejected[kernel]
