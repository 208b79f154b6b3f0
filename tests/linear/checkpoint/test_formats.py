"""Every format end to end: metadata, headers and tensors in; weight and contract out."""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from branchline.core.errors import CheckpointError
from branchline.core.quant_key import Granularity
from branchline.core.scheme import (
    BLOCK_128,
    BLOCK_128_UE8M0,
    MX_WEIGHT,
    NVFP4_WEIGHT,
    PER_CHANNEL,
    PER_TENSOR,
    LinearScheme,
    WeightScheme,
)
from branchline.linear import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
    NVFP4,
)
from tests.linear.checkpoint.samples import (
    FP8,
    GATE_PROJ,
    HEAD,
    LINEARS,
    ROUTER,
    SHAPE,
    Q,
    checkpoint,
    codes,
    ct,
    fp8,
    headers,
    layer,
    modelopt,
    normal,
    positive,
    quark,
    read,
)

N, K = SHAPE
BLOCKS = (2, 2)
DYNAMIC_TOKEN = {"strategy": "token", "dynamic": True}
GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
NVFP4_ARGS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MX_ARGS = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


def packed() -> torch.Tensor:
    return torch.randint(
        0, 256, (N, K // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def exponents(*shape) -> torch.Tensor:
    return torch.randint(
        118, 124, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def static() -> dict[str, torch.Tensor]:
    return {"weight": codes(N, K), "weight_scale": scalar(0.02), "input_scale": scalar(0.5)}


FORMATS = {
    "ct-static": (
        {"config": ct(inputs={})},
        LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
        static(),
    ),
    "ct-channel": (
        {"config": ct({"strategy": "channel"}, DYNAMIC_TOKEN)},
        LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
        {"weight": codes(N, K), "weight_scale": positive(N, 1).bfloat16()},
    ),
    "ct-weight-only": (
        {"config": ct({"strategy": "channel"}, format="naive-quantized")},
        LinearScheme(PER_CHANNEL, None),
        {"weight": codes(N, K), "weight_scale": positive(N, 1)},
    ),
    "ct-block": (
        {"config": ct(BLOCK, GROUP)},
        LinearScheme(BLOCK_128, FP8_DYNAMIC_GROUP128),
        {"weight": codes(N, K), "weight_scale": positive(*BLOCKS)},
    ),
    "ct-group": (
        {
            "config": ct(
                {"strategy": "group", "group_size": 64},
                {"strategy": "group", "group_size": 64, "dynamic": True},
            )
        },
        LinearScheme(
            WeightScheme(1, 64), replace(FP8_DYNAMIC_GROUP128, granularity=Granularity("group", 64))
        ),
        {"weight": codes(N, K), "weight_scale": positive(N, 3)},
    ),
    "ct-mxfp8": (
        {"config": ct(MX_ARGS, {**MX_ARGS, "dynamic": True}, format="mxfp8-quantized")},
        LinearScheme(MX_WEIGHT, MXFP8),
        {"weight": codes(N, K), "weight_scale": exponents(N, K // 32)},
    ),
    "ct-nvfp4": (
        {
            "config": ct(
                NVFP4_ARGS, {**NVFP4_ARGS, "dynamic": "local"}, format="nvfp4-pack-quantized"
            )
        },
        LinearScheme(NVFP4_WEIGHT, NVFP4),
        {
            "weight_packed": packed(),
            "weight_scale": positive(N, K // 16).mul(1000).to(FP8),
            "weight_global_scale": torch.tensor([800.0]),
            "input_global_scale": torch.tensor([20.0]),
        },
    ),
    "ct-nvfp4-weight-only": (
        {"config": ct(NVFP4_ARGS, format="nvfp4-pack-quantized")},
        LinearScheme(NVFP4_WEIGHT, None),
        {
            "weight_packed": packed(),
            "weight_scale": positive(N, K // 16).mul(1000).to(FP8),
            "weight_global_scale": torch.tensor([800.0]),
        },
    ),
    "modelopt-fp8": (
        {"own": modelopt()},
        LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
        static(),
    ),
    "modelopt-channel": (
        {"own": modelopt("FP8_PER_CHANNEL_PER_TOKEN")},
        LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
        {"weight": codes(N, K), "weight_scale": positive(N)},
    ),
    "modelopt-blocks": (
        {"own": modelopt("fp8_pb_wo")},
        LinearScheme(BLOCK_128, None),
        {"weight": codes(N, K), "weight_scale": positive(2, 1, 2, 1)},
    ),
    "modelopt-mxfp8": (
        {"own": modelopt("MXFP8", group_size=32)},
        LinearScheme(MX_WEIGHT, MXFP8),
        {"weight": codes(N, K), "weight_scale": exponents(N, K // 32)},
    ),
    "modelopt-nvfp4": (
        {"own": modelopt("NVFP4", group_size=16, kv_cache_quant_algo="FP8")},
        LinearScheme(NVFP4_WEIGHT, NVFP4),
        {
            "weight": packed(),
            "weight_scale": positive(N, K // 16).mul(1000).to(FP8),
            "weight_scale_2": scalar(0.00125),
            "input_scale": scalar(0.05),
        },
    ),
    "fine-grained": (
        {"config": fp8()},
        LinearScheme(BLOCK_128, FP8_DYNAMIC_GROUP128),
        {"weight": codes(N, K), "weight_scale_inv": positive(*BLOCKS)},
    ),
    "fine-grained-ue8m0": (
        {"config": fp8(scale_fmt="ue8m0")},
        LinearScheme(BLOCK_128_UE8M0, FP8_DYNAMIC_GROUP128_UE8M0),
        {"weight": codes(N, K), "weight_scale_inv": exponents(*BLOCKS).view(torch.float8_e8m0fnu)},
    ),
    "autofp8": (
        {"config": fp8(activation_scheme="static", weight_block_size=None)},
        LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
        static(),
    ),
    "transformers-static": (
        {"config": fp8(activation_scheme="static", weight_block_size=None)},
        LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
        {
            "weight": codes(N, K),
            "weight_scale_inv": scalar(0.02).bfloat16(),
            "activation_scale": scalar(0.5).bfloat16(),
        },
    ),
    "mxfp8": (
        {"config": {"quant_method": "mxfp8", "modules_to_not_convert": ["lm_head", "mlp.gate"]}},
        LinearScheme(MX_WEIGHT, MXFP8),
        {"weight": codes(N, K), "weight_scale_inv": exponents(N, K // 32)},
    ),
    "fbgemm": (
        {
            "config": {
                "quant_method": "fbgemm_fp8",
                "activation_scale_ub": 1200.0,
                "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            }
        },
        LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
        {"weight": codes(N, K), "weight_scale": positive(N, 1)},
    ),
    "quark-static": (
        {"config": quark()},
        LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
        static(),
    ),
    "quark-token": (
        {
            "config": quark(
                {"qscheme": "per_channel", "ch_axis": 0},
                {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True},
            )
        },
        LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
        {"weight": codes(N, K), "weight_scale": positive(N)},
    ),
}


@pytest.fixture(params=FORMATS, name="sample")
def _sample(request, tmp_path):
    files, scheme, parts = FORMATS[request.param]
    return read(tmp_path, **files), scheme, parts


def test_the_scheme(sample):
    metadata, scheme, parts = sample
    for known in (None, headers(checkpoint(**parts))):
        resolved = metadata.resolve(LINEARS, known)
        assert dict(resolved.schemes) == {Q: scheme, GATE_PROJ: scheme}
        assert resolved.unquantized == (ROUTER, HEAD)
        assert resolved.unmatched == ()


def test_all_tensors_are_named_and_no_other(sample):
    metadata, _, parts = sample
    tensors = checkpoint(**parts)
    resolved = metadata.resolve(LINEARS, headers({**tensors, **layer(Q, bias=normal(N))}))
    assert sorted(resolved.tensor_names(Q)) == sorted(f"{Q}.{part}" for part in parts)
    with pytest.raises(KeyError):
        resolved.tensor_names(HEAD)


def by_hand(parts) -> torch.Tensor:
    """The weight that the format means, in float64, from its documentation."""
    scale = next(parts[part] for part in ("weight_scale", "weight_scale_inv") if part in parts)
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.double() - 127)
    scale = scale.double()
    if "weight_global_scale" in parts:
        scale = scale / parts["weight_global_scale"].double()
    if "weight_scale_2" in parts:
        scale = scale * parts["weight_scale_2"].double()
    weight = parts.get("weight_packed", parts.get("weight"))
    if weight.dtype == torch.uint8:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        nibbles = torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
        weight = table[nibbles.int()]
    if scale.numel() == 1:
        return weight.double() * scale.reshape(())
    scale = scale.reshape(-1, scale.numel() // (scale.shape[0])) if scale.ndim != 2 else scale
    rows, columns = -(-N // scale.shape[0]), -(-K // scale.shape[1])
    rows, columns = (128 if rows not in (1, N) else rows), (128 if columns == 96 else columns)
    spread = scale.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]
    return weight.double() * spread


def test_the_weight_is_what_the_format_means(sample):
    metadata, scheme, parts = sample
    tensors = checkpoint(**parts)
    weight, contract = metadata.resolve(LINEARS, headers(tensors)).assemble(Q, tensors, SHAPE)
    assert weight.scheme == scheme.weight
    assert contract.key == scheme.input
    torch.testing.assert_close(weight.dequantize().double(), by_hand(parts), rtol=3e-7, atol=0)


def test_names_need_no_headers(sample):
    metadata, _, parts = sample
    tensors = checkpoint(**parts)
    known = metadata.resolve(LINEARS, headers(tensors)).assemble(Q, tensors, SHAPE)
    guessed = metadata.resolve(LINEARS, None).assemble(Q, tensors, SHAPE)
    assert torch.equal(known[0].dequantize(), guessed[0].dequantize())
    assert known[1].same_input(guessed[1])


def test_every_tensor_is_needed(sample):
    metadata, _, parts = sample
    for part in parts:
        tensors = checkpoint(**parts)
        del tensors[f"{GATE_PROJ}.{part}"]
        with pytest.raises(CheckpointError) as caught:
            metadata.resolve(LINEARS, headers(tensors))
        assert caught.value.subject == GATE_PROJ
        resolved = metadata.resolve(LINEARS, None)
        with pytest.raises(CheckpointError) as caught:
            resolved.assemble(GATE_PROJ, tensors, SHAPE)
        assert caught.value.subject == GATE_PROJ


# --- against the producers' own code -------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("ct-")])
def test_as_compressed_tensors_decompresses(name, tmp_path):
    files, _, parts = FORMATS[name]
    config = files["config"]
    group = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    given = {part: tensor for part, tensor in parts.items() if not part.startswith("input")}
    given["weight_scale"] = parts["weight_scale"]
    expected = compressor.decompress(given, group)["weight"]
    tensors = checkpoint(**parts)
    weight, _ = read(tmp_path, **files).resolve(LINEARS, None).assemble(Q, tensors, SHAPE)
    # It works in the scale's dtype or in bfloat16.
    torch.testing.assert_close(
        weight.dequantize(), expected.float(), rtol=1e-2, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("name", ["fine-grained", "fine-grained-ue8m0", "mxfp8"])
def test_as_transformers_dequantises(name, tmp_path):
    files, scheme, parts = FORMATS[name]
    # It takes whole blocks only.
    shape = (256, 384)
    grid = scheme.weight.scale_shape(*shape)
    scale = parts["weight_scale_inv"]
    scale = positive(*grid) if scale.dtype == torch.float32 else exponents(*grid).view(scale.dtype)
    tensors = layer(Q, weight=codes(*shape), weight_scale_inv=scale)
    weight, _ = read(tmp_path, **files).resolve(LINEARS, None).assemble(Q, tensors, shape)
    expected = Fp8Dequantize(None)._dequantize_one(codes(*shape), scale, torch.float32)
    assert torch.equal(weight.dequantize(), expected)


# --- scales of the input -------------------------------------------------------------------------


def contract_of(name, folder):
    files, _, parts = FORMATS[name]
    tensors = checkpoint(**parts)
    return read(folder, **files).resolve(LINEARS, headers(tensors)).assemble(Q, tensors, SHAPE)[1]


@pytest.mark.parametrize(
    "name", ["ct-static", "modelopt-fp8", "autofp8", "transformers-static", "quark-static"]
)
def test_a_static_scale_multiplies(name, tmp_path):
    contract = contract_of(name, tmp_path)
    assert contract.scale is not None
    assert contract.scale.number == 0.5
    assert contract.global_scale is None


@pytest.mark.parametrize("name", ["ct-nvfp4", "modelopt-nvfp4"])
def test_global_scales_of_either_kind_multiply(name, tmp_path):
    contract = contract_of(name, tmp_path)
    assert contract.global_scale is not None
    assert contract.global_scale.number == pytest.approx(0.05, rel=1e-6)
    assert contract.scale is None


@pytest.mark.parametrize("name", ["ct-weight-only", "ct-nvfp4-weight-only", "modelopt-blocks"])
def test_weight_only_takes_nothing(name, tmp_path):
    contract = contract_of(name, tmp_path)
    assert (contract.key, contract.scale, contract.global_scale) == (None, None, None)
