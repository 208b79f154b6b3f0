"""The choice of a kernel as data: any machine, any scheme, and every reason."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from branchline.core.errors import KernelUnavailableError
from branchline.core.platform import Platform, detect_platform, release
from branchline.core.quant_key import FP8_STATIC_TENSOR, MXFP8, ScaleLayout
from branchline.core.scheme import BLOCK_128, PER_TENSOR, SCHEMES, LinearScheme, WeightScheme
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.kernels.selection import KERNELS, kernel_names, select_kernel
from branchline.linear.kernels.torch_scaled import TorchScaledLinear
from branchline.linear.kernels.triton.fp8 import TritonBlockScaledLinear, TritonRowwiseLinear


def gpu(*capability: int, **more) -> Platform:
    facts = {"cuda_version": (13, 0), **more}
    return Platform("cuda", capability, "2.11.0+cu130", "3.6.0", "avx2", **facts)


def cpu(isa: str | None, **more) -> Platform:
    reason = "" if isa else "not built"
    return Platform("cpu", None, "2.13.0+cpu", "3.9.0", isa, reason, **more)


PLATFORMS = {
    "sm_80": gpu(8, 0),
    "sm_89": gpu(8, 9),
    "sm_90": gpu(9, 0),
    "sm_100": gpu(10, 0),
    "sm_103": gpu(10, 3),
    "sm_120": gpu(12, 0),
    "sm_90-cuda12.8": gpu(9, 0, cuda_version=(12, 8)),
    "sm_100-cuda12.6": gpu(10, 0, cuda_version=(12, 6)),
    "rocm": Platform("cuda", None, "2.11.0+rocm7.0", "3.6.0", "avx2", hip=True),
    "no-isa": cpu(None),
    "scalar": cpu("scalar"),
    "avx2": cpu("avx2"),
    "avx512": cpu("avx512"),
    "interpreted": cpu("avx512", interpreted=True),
}
TORCH, BLOCK, ROWWISE = "torch-scaled-mm", "triton-block", "triton-rowwise"
NATIVE = {"fp8-weight-only": "native-w8a16"} | {
    name: "native-fp8" for name in SCHEMES if name not in ("fp8-weight-only", "nvfp4")
}
GROUP = SCHEMES["fp8-block"].input
#: What runs where nothing else does.
LAST = dict.fromkeys(SCHEMES, "emulated") | {"fp8-weight-only": "w8a16"}
CHANNEL = {"fp8-static": ROWWISE, "fp8-dynamic": ROWWISE}
BLOCKS = {"fp8-block": BLOCK, "fp8-block-ue8m0": BLOCK}
ALL_TORCH = {name: TORCH for name in SCHEMES if name != "fp8-weight-only"}
CHOSEN = {
    "sm_80": LAST,
    "sm_89": LAST | ALL_TORCH | BLOCKS | {"mxfp8": "emulated", "nvfp4": "emulated"},
    "sm_90": LAST | ALL_TORCH | {"mxfp8": "emulated", "nvfp4": "emulated"},
    "sm_100": LAST | ALL_TORCH | BLOCKS,
    "sm_103": LAST | ALL_TORCH | BLOCKS,
    "sm_120": LAST | ALL_TORCH | BLOCKS | CHANNEL,
    "sm_90-cuda12.8": LAST | ALL_TORCH | BLOCKS | {"mxfp8": "emulated", "nvfp4": "emulated"},
    "sm_100-cuda12.6": LAST | ALL_TORCH | BLOCKS | {"mxfp8": "emulated", "nvfp4": "emulated"},
    "rocm": LAST,
    "no-isa": LAST,
    "scalar": LAST | NATIVE,
    "avx2": LAST | NATIVE,
    "avx512": LAST | NATIVE,
    "interpreted": LAST | NATIVE | CHANNEL | BLOCKS,
}


def config(scheme: str | LinearScheme, k: int = 4096, n: int = 4096) -> LinearConfig:
    return LinearConfig(k, n, SCHEMES[scheme] if isinstance(scheme, str) else scheme)


def reason(kernel: str, of: LinearConfig, platform: Platform) -> str:
    """Why `kernel` was not chosen."""
    with pytest.raises(KernelUnavailableError) as caught:
        select_kernel(of, platform, force=kernel, subject="q_proj")
    message = str(caught.value)
    for part in ("q_proj", str(of.scheme), str(platform), f"{kernel}: "):
        assert part in message
    assert "drop the forced kernel" in message
    return message


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_scheme_on_every_machine(platform, scheme):
    wanted = CHOSEN[platform][scheme]
    found = select_kernel(config(scheme), PLATFORMS[platform])
    assert found.kernel.name == wanted
    before = kernel_names()[: kernel_names().index(wanted)]
    assert tuple(rejection.name for rejection in found.rejected) == before
    assert all(rejection.reason for rejection in found.rejected)


@pytest.mark.parametrize(
    ("scheme", "k", "n", "platform", "wanted"),
    [
        ("fp8-dynamic", 4096, 4090, "sm_90", ROWWISE),
        ("fp8-static", 4100, 4096, "sm_89", ROWWISE),
        ("fp8-block", 4096, 576, "sm_90", BLOCK),
        ("fp8-block", 4096 + 64, 4096, "sm_90", BLOCK),
        ("fp8-block", 77, 5, "sm_100", BLOCK),
        ("mxfp8", 4096 + 16, 4096, "sm_100", "emulated"),
        ("nvfp4", 4096 + 16, 4096, "sm_100", "emulated"),
        ("mxfp8", 4096, 4096 + 8, "sm_100", "emulated"),
        ("fp8-dynamic", 0, 16, "sm_90", "emulated"),
        (LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR), 64, 64, "sm_120", TORCH),
        (LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR), 64, 65, "sm_120", ROWWISE),
        (LinearScheme(WeightScheme(1, 128), GROUP), 64, 64, "sm_90", BLOCK),
        (LinearScheme(WeightScheme(64, 64), GROUP), 64, 64, "sm_90", "emulated"),
        (LinearScheme(BLOCK_128, FP8_STATIC_TENSOR), 256, 256, "sm_90", "emulated"),
        (LinearScheme(BLOCK_128, MXFP8), 256, 256, "sm_100", "emulated"),
        (LinearScheme(BLOCK_128, None), 256, 256, "sm_90", "w8a16"),
    ],
)  # fmt: skip
def test_odd_shapes_and_mixed_schemes(scheme, k, n, platform, wanted):
    assert select_kernel(config(scheme, k, n), PLATFORMS[platform]).kernel.name == wanted


@pytest.mark.parametrize(
    ("kernel", "scheme", "k", "platform", "words"),
    [
        (TORCH, "fp8-dynamic", 4096, "sm_80", "sm_89 or later for FP8, the device is cuda sm_80"),
        (TORCH, "fp8-dynamic", 4096, "rocm", "under ROCm, the weights are on cuda (rocm)"),
        (TORCH, "fp8-dynamic", 4096, "avx2", "on NVIDIA devices, the weights are on cpu (avx2)"),
        (TORCH, "fp8-dynamic", 4100, "sm_90", "torch needs a multiple of 16 as K, not 4100"),
        (TORCH, "fp8-dynamic", 4096, "sm_120", "cuBLAS refuses a scale a row on sm_120"),
        (TORCH, "fp8-block", 4112, "sm_90", "torch needs a multiple of 128 as K, not 4112"),
        (TORCH, "fp8-block", 4096, "sm_100", "blocks on sm_90, the device is cuda sm_100"),
        (TORCH, "fp8-block", 4096, "sm_90-cuda12.8", "CUDA 12.9 on, torch was built with 12.8"),
        (TORCH, "mxfp8", 4096, "sm_90", "needs sm_100 or later, the device is cuda sm_90"),
        (TORCH, "nvfp4", 4096, "sm_100-cuda12.6", "from CUDA 12.8 on, torch was built with 12.6"),
        (TORCH, "fp8-weight-only", 4096, "sm_90", "matmul of fp8-channel x unquantised inputs"),
        (BLOCK, "fp8-block", 4096, "sm_80", "needs sm_89 or later for FP8"),
        (BLOCK, "fp8-block", 4096, "rocm", "on NVIDIA devices, the weights are on cuda (rocm)"),
        (BLOCK, "fp8-dynamic", 4096, "sm_90", "a scale for 128 columns of FP8, not fp8-channel"),
        (BLOCK, "mxfp8", 4096, "sm_90", "not fp8-block1x32-ue8m0"),
        (ROWWISE, "fp8-block", 4096, "sm_90", "channel or one in all, not fp8-block128x128"),
        (ROWWISE, "fp8-weight-only", 4096, "sm_90", "not unquantised ones"),
        (ROWWISE, "fp8-dynamic", 4096, "scalar", "NVIDIA devices, the weights are on cpu (scalar)"),
        ("w8a16", "fp8-dynamic", 4096, "sm_90", None),
        ("emulated", "fp8-weight-only", 4096, "sm_90", "this linear's input stays unquantised"),
    ],
)  # fmt: skip
def test_reasons(kernel, scheme, k, platform, words):
    if words is None:
        forced = select_kernel(config(scheme, k), PLATFORMS[platform], force=kernel)
        assert forced.kernel.name == kernel
        assert {rejection.reason for rejection in forced.rejected} == {f"{kernel!r} was forced"}
    else:
        assert words in reason(kernel, config(scheme, k), PLATFORMS[platform])


def test_versions_that_are_too_old():
    old = replace(gpu(9, 0), torch_version="2.10.1", triton_version="3.5.1")
    for kernel, words in (
        (TORCH, "needs torch 2.11, 2.10.1 is installed"),
        (ROWWISE, "needs triton 3.6, 3.5.1 is installed"),
    ):
        assert words in reason(kernel, config("fp8-dynamic"), old)
    without = replace(gpu(9, 0), triton_version=None)
    assert "triton, which is not installed" in reason(ROWWISE, config("fp8-dynamic"), without)
    assert release("3.10.0rc1") > release("3.6.0+git123")


def test_an_unknown_kernel_is_refused_with_the_known():
    with pytest.raises(KernelUnavailableError) as caught:
        select_kernel(config("fp8-dynamic"), gpu(9, 0), force="cutlass")
    assert all(name in str(caught.value) for name in ("'cutlass'", *kernel_names()))


def test_where_nothing_runs_every_reason_is_given(monkeypatch):
    from branchline.linear.kernels import selection

    few = (TorchScaledLinear, TritonBlockScaledLinear, TritonRowwiseLinear)
    monkeypatch.setattr(selection, "KERNELS", few)
    with pytest.raises(KernelUnavailableError) as caught:
        select_kernel(config("fp8-dynamic"), gpu(8, 0), subject="v_proj")
    message = str(caught.value)
    for part in ("v_proj", "cuda sm_80", *(f"{kernel.name}: it needs sm_89" for kernel in few)):
        assert part in message
    assert "leave the layer out" in message


def test_names_are_unique_and_ordered():
    assert kernel_names() == (
        TORCH, BLOCK, ROWWISE, "native-fp8", "emulated", "native-w8a16", "w8a16",
    )  # fmt: skip
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


# --- layouts -----------------------------------------------------------------------------------


def test_a_choice_needs_no_triton():
    """Where none can be installed, nothing imports it."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from branchline.linear.kernels.selection import kernel_names\n"
        "assert 'triton-rowwise' in kernel_names()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_each_consumes():
    block = SCHEMES["fp8-block"].input
    columns = replace(block, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=4)
    # One key: a site may feed linears of either kernel.
    assert TorchScaledLinear.consumes(config("fp8-block")) == columns
    assert TritonBlockScaledLinear.consumes(config("fp8-block", 77, 5)) == columns
    for name in ("mxfp8", "nvfp4"):
        swizzled = replace(SCHEMES[name].input, layout=ScaleLayout.SWIZZLE_128X4)
        assert TorchScaledLinear.consumes(config(name)) == swizzled
    for name in ("fp8-static", "fp8-dynamic"):
        for kernel in (TorchScaledLinear, TritonRowwiseLinear):
            assert kernel.consumes(config(name)) == SCHEMES[name].input
    assert TorchScaledLinear.consumes(config("fp8-weight-only")) is None


# --- facts -------------------------------------------------------------------------------------


def test_platforms_print_what_decides():
    wanted = {"sm_90": "cuda sm_90", "rocm": "cuda (rocm)", "no-isa": "cpu (no C kernels)"}
    assert {name: str(PLATFORMS[name]) for name in wanted} == wanted


def test_rocm_has_no_compute_capability(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    found = detect_platform("cuda")
    assert (found.hip, found.capability, found.cuda_version) == (True, None, None)


def test_cuda_facts(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = detect_platform("cuda")
    assert (found.hip, found.capability, found.cuda_version) == (False, (9, 0), (12, 8))
    assert detect_platform("cpu").capability is None
