"""ReLU² -> static FP8: every producer against the oracle."""

from __future__ import annotations

import pytest
import torch

from branchline.core.oracle import ActivationSemantics

RELU2 = ActivationSemantics("relu2", gated=False)
SHAPES = [(1, 1), (17, 5120), (5, 576), (3, 1368), (2, 3420), (9, 1), (2, 3, 70), (0, 64), (4, 0)]


def random(*shape: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 4).bfloat16().to(device)


def test_all_encodings(backend, encodings, scales):
    for scale in scales:
        backend.check(RELU2, scale, encodings.to(backend.device))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend, shape):
    backend.check(RELU2, 0.0371, random(*shape, device=backend.device))


def test_large(backend):
    backend.check(RELU2, 0.0371, random(128, 10240, device=backend.device))


def test_views(backend):
    x = random(6, 4, 200, device=backend.device)
    backend.check(RELU2, 0.5, x[::2, 0])
    backend.check(RELU2, 0.5, x[:, 1, 3:150])
    backend.check(RELU2, 0.5, x[2])
    backend.check(RELU2, 0.5, x[:, :1, :64])
    backend.check(RELU2, 0.5, x[0, 0].expand(5, 200))
    backend.check(RELU2, 0.5, x[:, :, 7:8])


def test_refused_views(backend):
    x = random(6, 4, 200, device=backend.device)
    for view in (x.transpose(1, 2), x[..., ::2], x[:, :3], x.transpose(0, 1)):
        verdict = backend.accepts(RELU2, view)
        assert not verdict.ok
        assert f"with strides {view.stride()}" in verdict.reason
    assert "the activation is ()" in backend.accepts(RELU2, x[0, 0, 0]).reason
    assert backend.accepts(RELU2, x.float()).reason.endswith(
        "compute bfloat16, the activation is float32"
    )


def test_a_row_does_not_depend_on_its_neighbours(backend):
    x = random(37, 1368, device=backend.device)
    together = backend.codes(RELU2, 0.0371, x)
    for row in (0, 17, 36):
        assert torch.equal(backend.codes(RELU2, 0.0371, x[row : row + 1])[0], together[row])
        assert torch.equal(backend.codes(RELU2, 0.0371, x[row:])[0], together[row])


def test_negative_zero_and_infinities(backend):
    x = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan, -torch.nan]).bfloat16()
    codes = backend.check(RELU2, 1.0, x.to(backend.device))
    assert codes.tolist() == [0x00, 0x00, 0x7E, 0x00, 0x7F, 0x7F]


SEMANTICS = ["relu2", "silu_mul", "rms_norm[llama]", "rms_norm[gemma]"]


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_native_predicate(reason, semantics):
    assert reason("native", semantics) == ""
    assert (
        reason("native", semantics, dtype=torch.float32)
        == "the C kernels compute bfloat16, the model is float32"
    )
    assert (
        reason("native", semantics, device_type="cuda", capability=(9, 0))
        == "the C kernels run on the cpu, the activation is on cuda"
    )
    assert (
        reason("native", semantics, native_isa=None, native_reason="not built: no C compiler")
        == "the C kernels are absent: not built: no C compiler"
    )


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_triton_predicate(reason, semantics):
    assert reason("triton", semantics, device_type="cuda", capability=(8, 9)) == ""
    assert reason("triton", semantics, interpreted=True) == ""
    assert (
        reason("triton", semantics, device_type="cuda", capability=(8, 0))
        == "the triton kernel needs sm_89 or later for float8e4nv, the device is sm_80"
    )
    assert (
        reason("triton", semantics)
        == "the triton kernel runs on cuda, the activation is on cpu (avx2)"
    )
    assert (
        reason("triton", semantics, triton_version=None)
        == "the triton kernel needs triton, which is not installed"
    )
    assert (
        reason("triton", semantics, dtype=torch.float16)
        == "the triton kernels compute bfloat16, the model is float16"
    )


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_eager_serves_everything(reason, semantics):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert reason("eager", semantics, dtype=dtype, native_isa=None, triton_version=None) == ""


def test_triton_refuses_cpu_tensors():
    from branchline.fusion.producers.unary import NativeRelu2, TritonRelu2

    x = random(2, 64)
    assert TritonRelu2().accepts((x,)).reason == (
        "the triton kernel runs on cuda, the activation is on cpu"
    )
    assert NativeRelu2().accepts((x.to("meta"),)).reason == (
        "the C kernels run on the cpu, the activation is on meta"
    )
