"""Where metadata is searched, what contradicts what, and hostile files."""

import json
import os

import pytest

from branchline.core.errors import CheckpointError
from branchline.core.scheme import BLOCK_128, NVFP4_WEIGHT, PER_CHANNEL, PER_TENSOR, LinearScheme
from branchline.linear import FP8_DYNAMIC_GROUP128, FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR, NVFP4
from branchline.linear.checkpoint import document, read_metadata
from tests.linear.checkpoint.samples import (
    GATE_PROJ,
    HEAD,
    LINEARS,
    ROUTER,
    Q,
    ct,
    fp8,
    modelopt,
    quark,
    read,
    write,
)

TOKEN = {"strategy": "token", "dynamic": True}
IN_CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head", "*mlp.gate"],
    "producer": {"name": "modelopt"},
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": False},
            "targets": ["Linear"],
        }
    },
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}


def refusal(folder, config=None, *, own=None, **files) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(folder, config, own=own, **files).resolve(LINEARS, None)
    return str(caught.value)


# --- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, {"model_type": "llama"}, {"quantization_config": None}])
def test_an_unquantised_checkpoint(config, tmp_path):
    if config is not None:
        write(tmp_path, **{"config.json": config})
    assert read_metadata(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "method", "source"),
    [
        (
            {"config.json": {"quantization_config": fp8()}},
            "fp8",
            "config.json: quantization_config",
        ),
        (
            {"config.json": {"compression_config": ct(inputs={})}},
            "compressed-tensors",
            "config.json: compression_config",
        ),
        (
            {"config.json": {"compression_config": {"quantization_config": ct(inputs={})}}},
            "compressed-tensors",
            "config.json: compression_config.quantization_config",
        ),
        (
            {"config.json": {"text_config": {"quantization_config": quark()}}},
            "quark",
            "config.json: text_config.quantization_config",
        ),
        ({"hf_quant_config.json": modelopt()}, "modelopt", "hf_quant_config.json: quantization"),
        (
            {"config.json": {"quantization_config": IN_CONFIG}},
            "modelopt",
            "config.json: quantization_config",
        ),
        ({"quantize_config.json": {"bits": 4, "group_size": 128}}, "gptq", "quantize_config.json"),
        ({"quant_config.json": {"w_bit": 4, "zero_point": True}}, "awq", "quant_config.json"),
    ],
)
def test_places(files, method, source, tmp_path):
    found = read(tmp_path, **files)
    assert (found.method, found.source) == (method, source)


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"quant_algo": "FP8"}, "modelopt"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "modelopt"),
        ({"config_groups": {"FP8": ["Linear"]}}, "compressed-tensors"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "FP8"}, "fp8"),
        ({"quant_method": "mxfp8"}, "fp8"),
    ],
)
def test_methods(fields, method, tmp_path):
    assert read(tmp_path, fields).method == method


def test_a_preset_of_compressed_tensors(tmp_path):
    fields = {"config_groups": {"FP8_DYNAMIC": ["Linear"]}, "format": "float-quantized"}
    schemes = read(tmp_path, fields).resolve(LINEARS, None).schemes
    assert set(schemes.values()) == {LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN)}
    assert len(schemes) == len(LINEARS)


def test_a_recipe_is_only_noted(tmp_path):
    (tmp_path / "recipe.yaml").write_text("stages: [")
    decisions = read(tmp_path, fp8()).resolve(LINEARS, None).decisions
    assert any("recipe.yaml" in text for text in decisions)


# --- several documents ---------------------------------------------------------------------------


def test_two_documents_that_agree_are_one(tmp_path):
    found = read(tmp_path, IN_CONFIG, own=modelopt())
    assert "config.json" in found.source
    assert "hf_quant_config.json" in found.source
    resolved = found.resolve(LINEARS, None)
    assert resolved.unquantized == (ROUTER, HEAD)
    assert any("KV cache" in text for text in resolved.decisions)


@pytest.mark.parametrize("silent", ["config", "own"])
def test_a_list_is_taken_from_the_one_that_has_it(silent, tmp_path):
    config, own = dict(IN_CONFIG), modelopt()
    del (config if silent == "config" else own["quantization"])[
        "ignore" if silent == "config" else "exclude_modules"
    ]
    assert read(tmp_path, config, own=own).resolve(LINEARS, None).unquantized == (ROUTER, HEAD)


@pytest.mark.parametrize(
    ("config", "own", "named"),
    [
        (fp8(), modelopt(), ["says fp8", "says modelopt"]),
        (IN_CONFIG, modelopt("NVFP4"), ["fp8-tensor", "fp4-block1x16"]),
        (IN_CONFIG, modelopt(exclude_modules=["lm_head"]), ["ignore", "*mlp.gate"]),
        (IN_CONFIG, modelopt(exclude_modules=["lm_head", "*mlp.gate", "x"]), ["'x'"]),
        ({"quant_method": "awq"}, modelopt(), ["awq", "modelopt"]),
    ],
)
def test_contradictions_name_both_sides(config, own, named, tmp_path):
    write(tmp_path, config, own=own)
    with pytest.raises(CheckpointError, match="contradict") as caught:
        read_metadata(tmp_path)
    for text in ("config.json: quantization_config", "hf_quant_config.json", *named):
        assert text in str(caught.value)


def test_the_places_of_one_file_contradict_too(tmp_path):
    config = {"quantization_config": fp8(), "text_config": {"quantization_config": quark()}}
    text = refusal(tmp_path, **{"config.json": config})
    assert "config.json: text_config.quantization_config" in text


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (fp8(ignored_layers=["lm_head"]), ["modules_to_not_convert", "ignored_layers"]),
        ({**IN_CONFIG, "exclude_modules": []}, ["exclude_modules", "ignore"]),
        ({**IN_CONFIG, "quant_algo": "NVFP4"}, ["num_bits 8", "NVFP4"]),
        ({**IN_CONFIG, "quantized_layers": {Q: {"quant_algo": "FP8"}}}, ["quantized_layers"]),
        (fp8(quant_method="mxfp8", scale_fmt="float"), ["scale_fmt", "mxfp8"]),
        (
            ct(
                config_groups={
                    "a": ct(inputs={})["config_groups"]["group_0"],
                    "b": ct({"strategy": "channel"}, TOKEN)["config_groups"]["group_0"],
                }
            ),
            ["config_groups.a", "config_groups.b", "Linear"],
        ),
    ],
)
def test_a_document_may_contradict_itself(config, named, tmp_path):
    text = refusal(tmp_path, config)
    for part in ("config.json: quantization_config", *named):
        assert part in text


# --- several schemes -----------------------------------------------------------------------------


def test_groups_from_names_over_patterns_to_classes(tmp_path):
    group = ct(inputs={})["config_groups"]["group_0"]
    channel = ct({"strategy": "channel"}, TOKEN)["config_groups"]["group_0"]
    block = {"strategy": "block", "block_structure": [128, 128]}
    inputs = {"strategy": "group", "group_size": 128, "dynamic": True}
    blocks = ct(block, inputs)["config_groups"]["group_0"]
    groups = {
        "every": {**group, "targets": ["Linear"]},
        "some": {**channel, "targets": ["re:.*mlp.*"]},
        "one": {**blocks, "targets": [GATE_PROJ, "model.layers.9.mlp.gate_proj"]},
    }
    resolved = read(tmp_path, ct(config_groups=groups, ignore=[HEAD])).resolve(LINEARS, None)
    assert dict(resolved.schemes) == {
        Q: LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
        ROUTER: LinearScheme(PER_CHANNEL, FP8_DYNAMIC_TOKEN),
        GATE_PROJ: LinearScheme(BLOCK_128, FP8_DYNAMIC_GROUP128),
    }
    assert any("model.layers.9.mlp.gate_proj" in text for text in resolved.decisions)


def test_mixed_precision_of_modelopt(tmp_path):
    layers = {Q: {"quant_algo": "FP8"}, GATE_PROJ: {"quant_algo": "NVFP4", "group_size": 16}}
    own = modelopt("MIXED_PRECISION", quantized_layers=layers)
    resolved = read(tmp_path, own=own).resolve(LINEARS, None)
    assert dict(resolved.schemes) == {
        Q: LinearScheme(PER_TENSOR, FP8_STATIC_TENSOR),
        GATE_PROJ: LinearScheme(NVFP4_WEIGHT, NVFP4),
    }
    assert resolved.tensor_names(GATE_PROJ)[2] == f"{GATE_PROJ}.weight_scale_2"
    assert resolved.unquantized == (ROUTER, HEAD)


def test_quark_layers(tmp_path):
    layer = quark({"qscheme": "per_channel", "ch_axis": 0})["global_quant_config"]
    cache = {**layer, "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    config = quark(layer_quant_config={"*gate_proj": layer, "*q_proj": cache})
    assert "output_tensors" in refusal(tmp_path, config)
    config["export"] = {"kv_cache_group": ["*q_proj"]}
    resolved = read(tmp_path, config).resolve(LINEARS, None)
    assert set(resolved.schemes.values()) == {LinearScheme(PER_CHANNEL, FP8_STATIC_TENSOR)}
    assert any("KV cache" in text for text in resolved.decisions)


# --- not served ----------------------------------------------------------------------------------

NVFP4_ARGS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (fp8(fmt="e5m2"), "e5m2"),
        (fp8(fmt="float8_e4m3fnuz"), "fnuz"),
        (fp8(expert_dtype="fp4"), "expert_dtype fp4"),
        (fp8(modules_to_convert=["model.embed"]), "modules_to_convert"),
        (ct({"type": "int"}), "int8"),
        (ct({"type": "int", "num_bits": 4}), "int4"),
        (ct(inputs={"type": "int"}), "input_activations in int8"),
        (ct({"symmetric": False}), "asymmetric"),
        (ct(inputs={"dynamic": True}), "dynamic per-tensor"),
        (ct(inputs={}, format="marlin-24"), "marlin-24"),
        (ct(inputs={}, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (ct(inputs={}, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (ct(NVFP4_ARGS, {"strategy": "token", "dynamic": True}), "eight-bit inputs"),
        (ct({"num_bits": 4, "strategy": "group", "group_size": 32}), "size 32"),
        (quark({"dtype": "int8"}), "int8"),
        (quark(inputs={"is_dynamic": True}), "dynamic inputs"),
        (quark({"qscheme": "per_group"}), "per_group"),
        (quark(algo_config=[{"name": "quarot"}]), "rotation"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "pre_quant_scale": True}, "scaled"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 10.0}, "activation_scale_ub 10"),
    ],
)
def test_what_is_not_served_is_named(config, named, tmp_path):
    found = read(tmp_path, config)
    with pytest.raises(CheckpointError, match="not served") as caught:
        found.resolve(LINEARS, None)
    assert named in caught.value.reason
    assert caught.value.remedy


def test_a_group_that_is_not_served_hurts_only_its_linears(tmp_path):
    group = ct(inputs={})["config_groups"]["group_0"]
    other = ct({"type": "int"})["config_groups"]["group_0"]
    groups = {"a": group, "b": {**other, "targets": ["re:vision.*"]}}
    found = read(tmp_path, ct(config_groups=groups))
    assert Q in found.resolve(LINEARS, None).schemes
    with pytest.raises(CheckpointError, match="vision\\.x"):
        found.resolve([*LINEARS, "vision.x"], None)


def test_the_bound_of_fbgemm_is_explained(tmp_path):
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    resolved = read(tmp_path, config).resolve(LINEARS, None)
    assert any("activation_scale_ub 1200" in text for text in resolved.decisions)
    assert resolved.unquantized == (HEAD,)


# --- hostile -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ("[]", "no JSON object"),
        ("{", "no JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"quantization_config": {"fmt": "e4m3", "fmt": "e5m2"}}', "'fmt' occurs twice"),
        ('{"quantization_config": []}', "quantization_config is []"),
        ('{"quantization_config": {}}', "quant_method is absent"),
        ('{"quantization_config": {"quant_method": 8}}', "quant_method is 8"),
        ('{"text_config": 3}', "text_config is 3"),
    ],
)
def test_damaged_files(text, reason, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_metadata(tmp_path)
    assert reason in str(caught.value)
    assert "config.json" in caught.value.subject


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}\x80")
    with pytest.raises(CheckpointError, match="no JSON"):
        read_metadata(tmp_path)


def test_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "hf_quant_config.json")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: is no regular file"):
        read_metadata(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: is no regular file"):
        read_metadata(tmp_path)


def test_a_file_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "LARGEST_FILE", 20)
    with pytest.raises(CheckpointError, match="at most 20"):
        read_metadata(write(tmp_path, fp8()))


WRONG = [
    (fp8(weight_block_size=[128]), "weight_block_size"),
    (fp8(weight_block_size=[128, -1]), "weight_block_size"),
    (fp8(weight_block_size=[128.0, 128]), "weight_block_size"),
    (fp8(weight_block_size=[True, True]), "weight_block_size"),
    (fp8(weight_block_size="128x128"), "weight_block_size"),
    (fp8(activation_scheme="sometimes"), "activation_scheme"),
    (fp8(activation_scheme=1), "activation_scheme"),
    (fp8(scale_fmt="ue4m3"), "scale_fmt"),
    (fp8(fmt=["e4m3"]), "fmt"),
    (fp8(modules_to_not_convert="lm_head"), "modules_to_not_convert"),
    (fp8(modules_to_not_convert=["lm_head", 3]), "modules_to_not_convert"),
    (fp8(modules_to_not_convert=[""]), "modules_to_not_convert"),
    (fp8(rotation=True), "rotation"),
    (ct(inputs={}, config_groups=[]), "config_groups"),
    (ct(inputs={}, config_groups={"a": 3}), "config_groups.a"),
    (ct(inputs={}, config_groups={"a": {"targets": "Linear"}}), "config_groups.a.targets"),
    (ct(inputs={}, config_groups={"a": ["Linear"]}), "config_groups"),
    (ct({"num_bits": "many"}), "config_groups.group_0.weights.num_bits"),
    (ct({"group_size": "x"}), "config_groups"),
    (ct({"strategy": "sometimes"}), "config_groups.group_0.weights.strategy"),
    (ct({"strategy": "block"}), "config_groups.group_0.weights"),
    (ct({"new_field": 1}), "config_groups.group_0.weights.new_field"),
    (ct(inputs={"strategy": "channel"}), "config_groups"),
    (ct(inputs={}) | {"ignore": "lm_head"}, "ignore"),
    (ct(inputs={}) | {"ignore": [None]}, "ignore"),
    (ct(inputs={}, sparsity_config=[1]), "sparsity_config"),
    (ct(inputs={}, permutation="yes"), "permutation"),
    ({"quant_method": "modelopt"}, "quant_algo"),
    ({"quant_method": "modelopt", "quant_algo": 8}, "quant_algo"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "group_size": "16"}, "group_size"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": "FP8"},
        },
        "quantized_layers",
    ),
    (IN_CONFIG | {"config_groups": {"a": {"weights": 3}}}, "config_groups.a: weights"),
    (quark(global_quant_config=None), "global_quant_config"),
    (quark(layer_quant_config=[]), "layer_quant_config"),
    (quark({"is_dynamic": "no"}), "is_dynamic"),
    (quark(algo_config=["rotation"]), "algo_config"),
    (quark(export={"kv_cache_group": "*k_proj"}), "kv_cache_group"),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": "1200"}, "activation_scale_ub"),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "activation_scale_ub"),
]


@pytest.mark.parametrize(
    ("config", "field"), WRONG, ids=[f"{i}-{field}" for i, (_, field) in enumerate(WRONG)]
)
def test_wrong_fields_are_named(config, field, tmp_path):
    write(tmp_path, config)
    with pytest.raises(CheckpointError) as caught:
        read_metadata(tmp_path)
    assert "config.json: quantization_config" in str(caught.value)
    assert field in str(caught.value)


def test_infinity_is_no_number(tmp_path):
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": float("inf")}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match="activation_scale_ub"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    ("config", "entry"),
    [
        (fp8(modules_to_not_convert=["*gate"]), "*gate"),
        (fp8(modules_to_not_convert=["re:(" * 300]), "re:("),
        (ct(inputs={}, ignore=["re:["]), "re:["),
        (ct(inputs={}, ignore=["re:a{99999999999}"]), "re:a{"),
        (quark(exclude=["re:a**"]), "re:a**"),
    ],
)
def test_patterns_that_are_none(config, entry, tmp_path):
    text = refusal(tmp_path, config)
    assert "config.json: quantization_config" in text
    assert entry in text
