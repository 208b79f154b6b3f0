"""The choice of a grouped kernel as data: any machine, any scheme, and every reason."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from branchline.core.errors import KernelUnavailableError
from branchline.core.platform import Platform
from branchline.core.quant_key import FP8_STATIC_TENSOR, ScaleLayout
from branchline.core.scheme import PER_TENSOR, SCHEMES, LinearScheme, WeightScheme
from branchline.linear.contract import InputContract
from branchline.linear.experts.kernels.base import GroupedConfig
from branchline.linear.experts.kernels.selection import (
    GROUPED_KERNELS,
    build_grouped_kernel,
    grouped_kernel_names,
    select_grouped_kernel,
)
from branchline.linear.experts.kernels.torch_grouped import TorchScaledExperts
from branchline.linear.experts.kernels.triton.fp8 import (
    TritonBlockScaledExperts,
    TritonRowwiseExperts,
)
from branchline.linear.experts.weight import ExpertsWeight
from branchline.linear.kernels.base import LinearConfig


def gpu(*capability: int, **more) -> Platform:
    facts = {"cuda_version": (13, 0), **more}
    return Platform("cuda", capability, "2.11.0+cu130", "3.6.0", "avx2", **facts)


PLATFORMS = {
    "sm_80": gpu(8, 0),
    "sm_89": gpu(8, 9),
    "sm_90": gpu(9, 0),
    "sm_100": gpu(10, 0),
    "sm_103": gpu(10, 3),
    "sm_120": gpu(12, 0),
    "rocm": Platform("cuda", None, "2.11.0+rocm7.0", "3.6.0", "avx2", hip=True),
    "no-triton": replace(gpu(9, 0), triton_version=None),
    "interpreted": Platform("cpu", None, "2.13.0", "3.9.0", None, "not built", interpreted=True),
    "no-isa": Platform("cpu", None, "2.13.0+cpu", "3.9.0", None, "not built"),
}
TORCH, BLOCK, ROWWISE = "torch-scaled-mm", "triton-block", "triton-rowwise"
#: What runs where nothing else does.
LAST = dict.fromkeys(SCHEMES, "emulated") | {"fp8-weight-only": "w8a16"}
TRITON = LAST | {
    "fp8-static": ROWWISE,
    "fp8-dynamic": ROWWISE,
    "fp8-block": BLOCK,
    "fp8-block-ue8m0": BLOCK,
}
WITH_TRITON = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "interpreted")


def config(scheme: str | LinearScheme, k: int = 4096, n: int = 4096, experts: int = 128):
    made = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    return GroupedConfig(experts, LinearConfig(k, n, made))


def reason(kernel: str, of: GroupedConfig, platform: Platform) -> str:
    """Why `kernel` was not chosen."""
    with pytest.raises(KernelUnavailableError) as caught:
        select_grouped_kernel(of, platform, force=kernel, subject="layers.0.mlp.experts")
    message = str(caught.value)
    for part in ("layers.0.mlp.experts", f"{of.experts} experts", str(platform), f"{kernel}: "):
        assert part in message
    assert "drop the forced kernel" in message
    return message


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_scheme_on_every_machine(platform, scheme):
    wanted = (TRITON if platform in WITH_TRITON else LAST)[scheme]
    found = select_grouped_kernel(config(scheme), PLATFORMS[platform])
    assert found.kernel.name == wanted
    before = grouped_kernel_names()[: grouped_kernel_names().index(wanted)]
    assert tuple(rejection.name for rejection in found.rejected) == before
    assert all(rejection.reason for rejection in found.rejected)


@pytest.mark.parametrize(
    ("scheme", "k", "n", "experts", "wanted"),
    [
        ("fp8-dynamic", 4100, 4090, 128, ROWWISE),
        ("fp8-block", 77, 5, 512, BLOCK),
        ("fp8-block", 4096, 1408, 1, BLOCK),
        ("fp8-dynamic", 4096, 4096, 1025, "emulated"),
        ("fp8-dynamic", 0, 16, 8, "emulated"),
        (LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR), 64, 65, 8, ROWWISE),
        (LinearScheme(WeightScheme(1, 128), SCHEMES["fp8-block"].input), 64, 64, 8, BLOCK),
        (LinearScheme(WeightScheme(64, 64), SCHEMES["fp8-block"].input), 64, 64, 8, "emulated"),
    ],
)
def test_odd_shapes_and_mixed_schemes(scheme, k, n, experts, wanted):
    assert select_grouped_kernel(config(scheme, k, n, experts), gpu(9, 0)).kernel.name == wanted


def test_the_library_is_chosen_by_name_alone():
    """It promises nothing about rows: nobody gets it who did not ask."""
    for platform in PLATFORMS.values():
        for scheme in SCHEMES:
            assert select_grouped_kernel(config(scheme), platform).kernel is not TorchScaledExperts
    for scheme in ("fp8-static", "fp8-dynamic"):
        found = select_grouped_kernel(config(scheme), gpu(9, 0), force=TORCH)
        assert found.kernel is TorchScaledExperts


@pytest.mark.parametrize(
    ("kernel", "scheme", "k", "experts", "platform", "words"),
    [
        (TORCH, "fp8-dynamic", 4096, 8, "sm_80", "sm_89 or later for FP8"),
        (TORCH, "fp8-dynamic", 4096, 8, "sm_89", "one for sm_90, the device is cuda sm_89"),
        (TORCH, "fp8-dynamic", 4096, 8, "sm_100", "one for sm_90, the device is cuda sm_100"),
        (TORCH, "fp8-dynamic", 4096, 8, "rocm", "under ROCm, the weights are on cuda (rocm)"),
        (TORCH, "fp8-dynamic", 4096, 8, "no-isa", "on NVIDIA devices, the weights are on cpu"),
        (TORCH, "fp8-dynamic", 4100, 8, "sm_90", "torch needs a multiple of 16 as K, not 4100"),
        (TORCH, "fp8-dynamic", 4096, 1024, "sm_90", "torch takes 1023 experts, not 1024"),
        (TORCH, "fp8-block", 4096, 8, "sm_90", "no grouped matmul of fp8-block128x128"),
        (TORCH, "mxfp8", 4096, 8, "sm_90", "no grouped matmul of fp8-block1x32-ue8m0"),
        (TORCH, "fp8-weight-only", 4096, 8, "sm_90", "fp8-channel x unquantised inputs"),
        (BLOCK, "fp8-block", 4096, 8, "sm_80", "needs sm_89 or later for FP8"),
        (BLOCK, "fp8-block", 4096, 8, "rocm", "on NVIDIA devices"),
        (BLOCK, "fp8-block", 4096, 8, "no-triton", "triton, which is not installed"),
        (BLOCK, "fp8-block", 4096, 2000, "sm_90", "1024 experts a layer, not more"),
        (BLOCK, "fp8-dynamic", 4096, 8, "sm_90", "a scale for 128 columns of FP8, not fp8-channel"),
        (ROWWISE, "fp8-block", 4096, 8, "sm_90", "not fp8-block128x128"),
        (ROWWISE, "fp8-weight-only", 4096, 8, "sm_90", "not unquantised ones"),
    ],
)
def test_reasons(kernel, scheme, k, experts, platform, words):
    assert words in reason(kernel, config(scheme, k, experts=experts), PLATFORMS[platform])


def test_versions_that_are_too_old():
    old = replace(gpu(9, 0), torch_version="2.10.1", triton_version="3.5.1")
    for kernel, words in ((TORCH, "needs torch 2.11"), (ROWWISE, "needs triton 3.6")):
        assert words in reason(kernel, config("fp8-dynamic"), old)
    assert select_grouped_kernel(config("fp8-dynamic"), old).kernel.name == "emulated"


def test_a_kernel_of_linears_alone_is_refused_with_the_known():
    with pytest.raises(KernelUnavailableError, match="has no form for experts") as caught:
        select_grouped_kernel(config("fp8-dynamic"), gpu(9, 0), force="cutlass")
    assert all(name in str(caught.value) for name in grouped_kernel_names())


def test_names_are_unique_and_ours_come_first():
    names = grouped_kernel_names()
    assert names[:2] == (BLOCK, ROWWISE)
    assert names[-1] == TORCH
    assert len(set(names)) == len(GROUPED_KERNELS)


def test_what_each_consumes():
    block = config("fp8-block")
    key = block.linear.scheme.input
    # What a site before one or several linears emits, so that one producer serves experts too.
    assert TritonBlockScaledExperts.consumes(block) == replace(
        key, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=4
    )
    for name in ("fp8-static", "fp8-dynamic"):
        for kernel in (TritonRowwiseExperts, TorchScaledExperts):
            assert kernel.consumes(config(name)) == SCHEMES[name].input


def test_a_built_kernel_keeps_why_others_were_not_chosen():
    weight = ExpertsWeight.from_float(torch.ones(2, 8, 16), "experts")
    contract = InputContract(SCHEMES["fp8-dynamic"].input)
    built = build_grouped_kernel("experts", weight, None, contract, PLATFORMS["no-isa"])
    assert built.name == "emulated"
    assert [r.name for r in built.rejected][:2] == [BLOCK, ROWWISE]


def test_a_choice_needs_no_triton():
    """Where none can be installed, nothing imports it."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from branchline.linear.experts.kernels.selection import grouped_kernel_names\n"
        "assert 'triton-block' in grouped_kernel_names()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
