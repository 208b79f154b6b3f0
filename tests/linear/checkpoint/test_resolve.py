"""Tensors beside metadata: they decide what it leaves open, and contradict it by name."""

import pytest
import torch

from branchline.core.errors import CheckpointError
from branchline.core.scheme import (
    BLOCK_128,
    BLOCK_128_UE8M0,
    MX_WEIGHT,
    PER_CHANNEL,
    PER_TENSOR,
    LinearScheme,
)
from branchline.linear import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    MXFP8,
)
from branchline.linear.checkpoint import KV_CACHE_SCALES
from tests.linear.checkpoint.samples import (
    GATE_PROJ,
    HEAD,
    LINEARS,
    ROUTER,
    SHAPE,
    Q,
    checkpoint,
    codes,
    ct,
    float_layers,
    fp8,
    headers,
    layer,
    modelopt,
    positive,
    read,
)

N, K = SHAPE
ONE = torch.tensor(0.02)
STATIC = {"weight": codes(N, K), "weight_scale": ONE, "input_scale": ONE}
DYNAMIC = {"weight": codes(N, K), "weight_scale": ONE}


def refused(metadata, tensors, name) -> str:
    with pytest.raises(CheckpointError) as caught:
        metadata.resolve(LINEARS, headers(tensors))
    assert caught.value.subject == name
    return str(caught.value)


# --- where the metadata is silent ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "scheme"),
    [
        (STATIC, LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR)),
        (DYNAMIC, LinearScheme(PER_TENSOR, FP8_DYNAMIC_TOKEN)),
        (
            {"weight": codes(N, K), "weight_scale": positive(N, 1)},
            LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
        ),
        (
            {"weight": codes(N, K), "weight_scale": positive(N)},
            LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
        ),
        (
            {"weight": codes(N, K), "weight_scale_inv": positive(2, 2)},
            LinearScheme(BLOCK_128, FP8_DYNAMIC_GROUP128),
        ),
        (
            {
                "weight": codes(N, K),
                "weight_scale_inv": torch.ones(2, 2).to(torch.float8_e8m0fnu),
            },
            LinearScheme(BLOCK_128_UE8M0, FP8_DYNAMIC_GROUP128_UE8M0),
        ),
        (
            {"weight": codes(N, K), "scale": positive(2, 2), "activation_scale": ONE},
            LinearScheme(BLOCK_128, FP8_STATIC_TENSOR),
        ),
    ],
)
def test_tensors_decide(parts, scheme, tmp_path):
    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "gate"]}
    resolved = read(tmp_path, config).resolve(LINEARS, headers(checkpoint(**parts)))
    assert set(resolved.schemes.values()) == {scheme}
    assert any("the tensors say" in text and str(scheme) in text for text in resolved.decisions)
    assert sorted(resolved.tensor_names(Q)) == sorted(f"{Q}.{part}" for part in parts)


def test_a_scale_format_that_is_said_stays(tmp_path):
    parts = {"weight": codes(N, K), "weight_scale_inv": torch.ones(2, 2)}
    config = {"quant_method": "fp8", "scale_fmt": "ue8m0"}
    resolved = read(tmp_path, config).resolve(LINEARS, headers(checkpoint(**parts)))
    assert resolved.schemes[Q] == LinearScheme(BLOCK_128_UE8M0, FP8_DYNAMIC_GROUP128_UE8M0)


def test_a_small_weight_in_one_block_is_not_per_tensor(tmp_path):
    parts = {"weight": codes(128, 64), "weight_scale_inv": positive(1, 1)}
    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "gate"]}
    resolved = read(tmp_path, config).resolve(LINEARS, headers(checkpoint(**parts)))
    assert resolved.schemes[Q] == LinearScheme(BLOCK_128, FP8_DYNAMIC_GROUP128)


def test_without_tensors_the_defaults_are_said(tmp_path):
    resolved = read(tmp_path, {"quant_method": "fp8"}).resolve(LINEARS, None)
    assert set(resolved.schemes.values()) == {LinearScheme(BLOCK_128, FP8_DYNAMIC_GROUP128)}
    for what in ("blocks", "inputs", "scale format"):
        assert any(f"{what} open: the default" in text for text in resolved.decisions)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_blocks_of_32_with_exponents_are_mxfp8(dtype, tmp_path):
    scale = torch.full((N, K // 32), 120, dtype=torch.uint8).view(dtype)
    parts = {"weight": codes(N, K), "weight_scale_inv": scale}
    metadata = read(tmp_path, fp8(weight_block_size=[1, 32]))
    resolved = metadata.resolve(LINEARS, headers(checkpoint(**parts)))
    assert resolved.schemes[Q] == LinearScheme(MX_WEIGHT, MXFP8)


def test_a_scale_of_no_known_shape(tmp_path):
    parts = {"weight": codes(N, K), "weight_scale": positive(N, 3)}
    metadata = read(
        tmp_path, {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "gate"]}
    )
    assert "weight_block_size" in refused(metadata, checkpoint(**parts), Q)


def test_without_a_list_float_linears_stay(tmp_path):
    metadata = read(tmp_path, {"quant_method": "fp8", "weight_block_size": None})
    resolved = metadata.resolve(LINEARS, headers(checkpoint(**DYNAMIC)))
    assert resolved.unquantized == (ROUTER, HEAD)
    assert any("does not name 2" in text for text in resolved.decisions)


def test_without_a_list_a_quantised_head_is_quantised(tmp_path):
    metadata = read(tmp_path, {"quant_method": "fp8", "weight_block_size": None})
    tensors = {**checkpoint(**DYNAMIC), **layer(HEAD, **DYNAMIC)}
    assert HEAD in metadata.resolve(LINEARS, headers(tensors)).schemes


@pytest.mark.parametrize("tied", [False, True])
def test_a_list_need_not_name_a_float_head(tied, tmp_path):
    metadata = read(tmp_path, own=modelopt(exclude_modules=["*mlp.gate"]))
    assert HEAD in metadata.resolve(LINEARS, None).schemes
    tensors = checkpoint(**STATIC)
    if tied:
        del tensors[f"{HEAD}.weight"]
    assert metadata.resolve(LINEARS, headers(tensors)).unquantized == (ROUTER, HEAD)


# --- contradictions ------------------------------------------------------------------------------


def test_all_float_is_unquantised(tmp_path):
    metadata = read(tmp_path, ct(inputs={}))
    tensors = float_layers(*LINEARS)
    resolved = metadata.resolve(LINEARS, headers(tensors))
    assert (resolved.schemes, resolved.unquantized) == ({}, LINEARS)
    assert any("every weight is float" in text for text in resolved.decisions)


def test_all_float_needs_all(tmp_path):
    metadata = read(tmp_path, ct(inputs={}))
    tensors = {**checkpoint(**STATIC), **float_layers(GATE_PROJ)}
    text = refused(metadata, tensors, GATE_PROJ)
    assert "config.json: quantization_config (config_groups.group_0)" in text
    assert "torch.bfloat16" in text


def test_no_tensor_of_the_model_is_there(tmp_path):
    tensors = {f"other.{name}": tensor for name, tensor in checkpoint(**STATIC).items()}
    assert f"{Q}.weight" in refused(read(tmp_path, ct(inputs={})), tensors, Q)


def test_the_float_weight_of_a_stray_entry(tmp_path):
    entry = f"language_model.{Q}"
    metadata = read(tmp_path, ct(inputs={}, ignore=[HEAD, ROUTER, entry]))
    assert entry in refused(metadata, {**checkpoint(**STATIC), **float_layers(Q)}, Q)


@pytest.mark.parametrize("ignore", [[HEAD, ROUTER, Q], [HEAD, "re:.*(gate|attn.*)$"]])
def test_codes_of_an_ignored_linear(ignore, tmp_path):
    metadata = read(tmp_path, ct(inputs={}, ignore=ignore))
    text = refused(metadata, checkpoint(**STATIC), Q)
    assert "(ignore)" in text
    assert "float8_e4m3fn" in text


def test_codes_of_a_linear_without_a_group(tmp_path):
    config = ct(inputs={})
    config["config_groups"]["group_0"]["targets"] = [GATE_PROJ]
    assert "no group" in refused(read(tmp_path, config), checkpoint(**STATIC), Q)


def test_codes_although_nothing_is_quantised(tmp_path):
    metadata = read(tmp_path, own=modelopt(None, kv_cache_quant_algo="FP8"))
    assert metadata.resolve(LINEARS, None).schemes == {}
    assert metadata.resolve(LINEARS, headers(float_layers(*LINEARS))).schemes == {}
    refused(metadata, checkpoint(**STATIC), Q)


def test_targets_that_name_nothing(tmp_path):
    config = ct(inputs={})
    config["config_groups"]["group_0"]["targets"] = ["re:transformer.*"]
    with pytest.raises(CheckpointError, match="none of the model's 4 linears"):
        read(tmp_path, config).resolve(LINEARS, None)


@pytest.mark.parametrize(
    ("config", "parts", "named"),
    [
        (ct(inputs={}), DYNAMIC, ["input scale", f"{Q}.input_scale"]),
        (ct({"strategy": "channel"}), STATIC, [f"{Q}.input_scale"]),
        (fp8(weight_block_size=None), STATIC, [f"{Q}.input_scale"]),
        (fp8(), {"weight": codes(N, K)}, ["weight scale", f"{Q}.weight_scale_inv"]),
        (fp8(), {"weight_scale_inv": positive(2, 2)}, [f"{Q}.weight", "weight_scale_inv"]),
        (
            fp8(),
            {"weight": codes(N, K), "weight_scale": ONE, "weight_scale_inv": positive(2, 2)},
            ["weight_scale_inv and weight_scale"],
        ),
        (ct(inputs={}), {**STATIC, "weight_zero_point": ONE}, ["weight_zero_point"]),
        (ct(inputs={}), {**STATIC, "pre_quant_scale": ONE}, ["pre_quant_scale"]),
        (ct(inputs={}), {**STATIC, "weight": codes(N, K).view(torch.int8)}, ["torch.int8"]),
        (
            ct(inputs={}),
            {**STATIC, "weight": codes(N, K).view(torch.float8_e4m3fnuz)},
            ["float8_e4m3fnuz"],
        ),
        (ct(inputs={}), {**STATIC, "weight": codes(N, K).view(torch.float8_e5m2)}, ["float8_e5m2"]),
    ],
)
def test_the_layer_and_the_tensor_are_named(config, parts, named, tmp_path):
    text = refused(read(tmp_path, config), checkpoint(**parts), Q)
    for part in named:
        assert part in text


@pytest.mark.parametrize("part", KV_CACHE_SCALES)
def test_scales_of_the_cache_are_noted(part, tmp_path):
    parts = {**STATIC, part: ONE}
    resolved = read(tmp_path, ct(inputs={})).resolve(LINEARS, headers(checkpoint(**parts)))
    assert any(part in text and "KV cache" in text for text in resolved.decisions)
    assert f"{Q}.{part}" not in resolved.tensor_names(Q)


def test_fused_names_are_reported(tmp_path):
    entries = ["model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"]
    for config in (ct(inputs={}, ignore=[*entries, HEAD]), fp8(modules_to_not_convert=entries)):
        resolved = read(tmp_path, config).resolve(LINEARS, None)
        assert resolved.unmatched == tuple(entries)
        assert {Q, GATE_PROJ} <= resolved.schemes.keys()


def test_results_cannot_be_changed(tmp_path):
    resolved = read(tmp_path, fp8()).resolve(LINEARS, None)
    with pytest.raises(TypeError):
        resolved.schemes["x"] = resolved.schemes[Q]
