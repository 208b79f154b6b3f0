"""Tensors of one linear: shapes of scales as formats vary them, and values that are refused."""

import pytest
import torch

from branchline.core.errors import CheckpointError, ScaleError
from tests.linear.checkpoint.samples import (
    FP8,
    LINEARS,
    SHAPE,
    Q,
    codes,
    ct,
    fp8,
    layer,
    modelopt,
    positive,
    read,
)

N, K = SHAPE
CHANNEL = ct({"strategy": "channel"}, {"strategy": "token", "dynamic": True})
NVFP4 = modelopt("NVFP4")


def assemble(folder, parts, *, shape=SHAPE, **files):
    resolved = read(folder, **files).resolve(LINEARS, None)
    return resolved.assemble(Q, layer(Q, **parts), shape)


def static(**changes):
    scale = torch.tensor(0.5)
    return {"weight": codes(N, K), "weight_scale": scale, "input_scale": scale, **changes}


def nvfp4(**changes):
    return {
        "weight": torch.full((N, K // 2), 0x21, dtype=torch.uint8),
        "weight_scale": torch.ones(N, K // 16).to(FP8),
        "weight_scale_2": torch.tensor(0.5),
        "input_scale": torch.tensor(0.25),
        **changes,
    }


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale(shape, tmp_path):
    scale = torch.full(shape, 0.5)
    parts = static(weight_scale=scale, input_scale=scale)
    weight, contract = assemble(tmp_path, parts, config=ct(inputs={}))
    assert weight.scale.shape == (1, 1)
    assert torch.equal(weight.dequantize(), codes(N, K).float() * 0.5)
    assert contract.scale is not None
    assert contract.scale.value.shape == (1,)


@pytest.mark.parametrize("shape", [(N,), (N, 1), (1, N)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_a_channel(shape, dtype, tmp_path):
    scale = positive(N).to(dtype)
    parts = {"weight": codes(N, K), "weight_scale": scale.reshape(shape)}
    weight, _ = assemble(tmp_path, parts, config=CHANNEL)
    assert weight.scale.dtype == torch.float32
    assert torch.equal(weight.dequantize(), codes(N, K).float() * scale.float()[:, None])


def test_nibbles_and_both_scales(tmp_path):
    weight, contract = assemble(tmp_path, nvfp4(), own=NVFP4)
    # 0x21: the low nibble first, codes 1 and 2.
    assert torch.equal(weight.dequantize()[0, :2], torch.tensor([0.25, 0.5]))
    assert weight.global_scale is not None
    assert weight.global_scale.shape == (1,)
    assert contract.global_scale is not None
    assert contract.global_scale.number == 0.25


def test_power_of_two_scales_may_lie_in_float32(tmp_path):
    config = fp8(scale_fmt="ue8m0")
    scale = torch.tensor([[0.25, 2.0], [2.0**-40, 1.0]])
    weight, _ = assemble(
        tmp_path, {"weight": codes(N, K), "weight_scale_inv": scale}, config=config
    )
    assert torch.equal(weight.scales(), scale)
    with pytest.raises(ScaleError, match="no powers of two") as caught:
        assemble(tmp_path, {"weight": codes(N, K), "weight_scale_inv": scale * 1.5}, config=config)
    assert caught.value.subject == Q


def nan_codes():
    bad = codes(N, K).view(torch.uint8).clone()
    bad[3, 5] = 0xFF
    return bad.view(FP8)


START = torch.finfo(torch.float32).min
E8M0_NAN = torch.full((2, 2), 255, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("files", "parts", "reason"),
    [
        ({"config": ct(inputs={})}, static(weight_scale=torch.tensor(0.0)), "0.0"),
        ({"config": ct(inputs={})}, static(weight_scale=torch.tensor(START)), "-3.4"),
        ({"config": ct(inputs={})}, static(weight_scale=torch.tensor(float("nan"))), "nan"),
        ({"config": ct(inputs={})}, static(weight_scale=torch.ones(3)), r"shape \(3,\)"),
        ({"config": ct(inputs={})}, static(weight_scale=torch.tensor(2)), "torch.int64"),
        ({"config": ct(inputs={})}, static(input_scale=torch.tensor(0.0)), "input scale"),
        ({"config": ct(inputs={})}, static(input_scale=torch.tensor(START)), "input scale"),
        ({"config": ct(inputs={})}, static(input_scale=torch.ones(2)), "2 elements"),
        ({"config": ct(inputs={})}, static(input_scale=torch.tensor(1)), "torch.int64"),
        ({"config": ct(inputs={})}, static(weight=nan_codes()), "NaN"),
        ({"own": NVFP4}, nvfp4(weight_scale_2=torch.tensor(0.0)), "global scale is 0.0"),
        ({"own": NVFP4}, nvfp4(weight_scale_2=torch.tensor(float("inf"))), "global scale is inf"),
        ({"own": NVFP4}, nvfp4(weight_scale_2=torch.ones(2)), "expected one number"),
        ({"own": NVFP4}, nvfp4(input_scale=torch.tensor(START)), "input's global scale"),
        ({"own": NVFP4}, nvfp4(weight_scale=torch.ones(N, K // 16)), "torch.float32"),
        ({"own": NVFP4}, nvfp4(weight_scale=torch.ones(N, 1).to(FP8)), "shape"),
        (
            {"config": fp8(scale_fmt="ue8m0")},
            {"weight": codes(N, K), "weight_scale_inv": E8M0_NAN},
            "nan",
        ),
        (
            {"config": fp8()},
            {"weight": codes(N, K), "weight_scale_inv": E8M0_NAN},
            "torch.uint8",
        ),
    ],
)
def test_unusable_scales_name_the_layer(files, parts, reason, tmp_path):
    with pytest.raises(ScaleError, match=reason) as caught:
        assemble(tmp_path, parts, **files)
    assert caught.value.subject == Q


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_divisors(value, tmp_path):
    args = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    parts = {
        "weight_packed": torch.zeros(N, K // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(N, K // 16).to(FP8),
        "weight_global_scale": torch.tensor([value]),
    }
    with pytest.raises(ScaleError, match="global scale is") as caught:
        assemble(tmp_path, parts, config=ct(args, format="nvfp4-pack-quantized"))
    assert caught.value.subject == Q


@pytest.mark.parametrize(
    ("files", "parts", "reason"),
    [
        ({"config": ct(inputs={})}, static(weight=codes(N, K).float()), "torch.float32"),
        ({"config": ct(inputs={})}, static(weight=codes(K, N)), "shape"),
        (
            {"config": ct(inputs={})},
            static(weight=codes(N, K).view(torch.float8_e4m3fnuz)),
            "fnuz",
        ),
        ({"own": NVFP4}, nvfp4(weight=torch.zeros(N, K, dtype=torch.uint8)), "shape"),
        ({"own": NVFP4}, nvfp4(weight=codes(N, K // 2)), "float8_e4m3fn"),
        ({"config": fp8()}, {"weight": codes(N, K)}, "missing"),
        (
            {"config": fp8()},
            {"weight": codes(N, K), "weight_scale": positive(2, 2), "scale": positive(2, 2)},
            "two names",
        ),
    ],
)
def test_unusable_codes_name_the_layer(files, parts, reason, tmp_path):
    with pytest.raises(CheckpointError, match=reason) as caught:
        assemble(tmp_path, parts, **files)
    assert caught.value.subject == Q
