"""The public cases: small metadata, each the core of a fault that people met elsewhere."""

import json
from pathlib import Path

import pytest
import torch

from branchline.core.errors import CheckpointError
from branchline.core.platform import detect_platform
from branchline.linear import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_GROUP128_UE8M0,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
)
from branchline.linear.checkpoint import TensorHeader, read_metadata
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.w8a16 import W8A16Linear

FILE = json.loads((Path(__file__).parents[2] / "cases" / "quant_configs.json").read_text())
CASES = {case["id"]: case for case in FILE["cases"]}
KEYS = {
    "FP8 static per-tensor": FP8_STATIC_TENSOR,
    "FP8 dynamic per-token": FP8_DYNAMIC_TOKEN,
    "FP8 dynamic group-128": FP8_DYNAMIC_GROUP128,
    # As the oracle makes it: power-of-two scales, carried in float32.
    "FP8 dynamic group-128 UE8M0": FP8_DYNAMIC_GROUP128_UE8M0,
    None: None,
}
# What this file looks at; an expectation of another name would go unread.
READ = {
    "key",
    "kernel",
    "unquantized",
    "unquantized_count",
    "reported_unmatched",
    "result",
    "error_names",
    "missing_input_scale",
    "note",
    # Of the sites, which are found in a model.
    "site",
    "fused",
    "reason_names",
}


def of(case, folder, headers=None):
    for name, content in case["files"].items():
        (folder / name).write_text(json.dumps(content))
    found = read_metadata(folder)
    assert found is not None
    return found.resolve(FILE["modules"][case["modules"]], headers)


def named(*expectations):
    return [
        pytest.param(case, id=name)
        for name, case in CASES.items()
        if set(expectations) & case["expect"].keys()
    ]


def test_every_expectation_is_read():
    assert {key for case in CASES.values() for key in case["expect"]} <= READ
    assert CASES.keys() >= {"ct-static", "modelopt-glob", "int4"}
    assert len(CASES) == 18


@pytest.mark.parametrize("case", named("key"))
def test_key(case, tmp_path):
    resolved = of(case, tmp_path)
    assert {scheme.input for scheme in resolved.schemes.values()} == {KEYS[case["expect"]["key"]]}


@pytest.mark.parametrize("case", named("unquantized", "unquantized_count"))
def test_unquantized(case, tmp_path):
    resolved = of(case, tmp_path)
    expect, modules = case["expect"], FILE["modules"][case["modules"]]
    assert set(resolved.unquantized) | resolved.schemes.keys() == set(modules)
    assert len(resolved.unquantized) + len(resolved.schemes) == len(modules)
    if "unquantized" in expect:
        assert sorted(resolved.unquantized) == sorted(expect["unquantized"])
    else:
        assert len(resolved.unquantized) == expect["unquantized_count"]


@pytest.mark.parametrize("case", named("reported_unmatched"))
def test_unmatched(case, tmp_path):
    assert list(of(case, tmp_path).unmatched) == case["expect"]["reported_unmatched"]


@pytest.mark.parametrize("case", named("result"))
def test_refused(case, tmp_path):
    assert case["expect"]["result"] == "refused"
    with pytest.raises(CheckpointError) as caught:
        of(case, tmp_path)
    for name in case["expect"]["error_names"]:
        assert name in str(caught.value)


@pytest.mark.parametrize("case", named("kernel"))
def test_weight_only_is_multiplied_unquantised(case, tmp_path):
    assert case["expect"]["kernel"] == "W8A16"
    for scheme in of(case, tmp_path).schemes.values():
        config = LinearConfig(256, 256, scheme)
        assert W8A16Linear.can_implement(config).ok
        assert not EmulatedLinear.can_implement(config).ok
    assert W8A16Linear.is_supported(detect_platform()).ok


@pytest.mark.parametrize("case", named("missing_input_scale"))
def test_static_without_an_input_scale_names_the_layer(case, tmp_path):
    modules = FILE["modules"][case["modules"]]
    parts = {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}
    headers = {
        f"{name}.{part}": TensorHeader(dtype, (256, 256) if part == "weight" else ())
        for name in modules
        for part, dtype in {**parts, "input_scale": torch.float32}.items()
    }
    headers |= {"lm_head.weight": TensorHeader(torch.bfloat16, (256, 256))}
    for part in ("weight_scale", "input_scale"):
        del headers[f"lm_head.{part}"]
    assert len(of(case, tmp_path, headers).schemes) == len(modules) - 1
    del headers[f"{modules[9]}.input_scale"]
    with pytest.raises(CheckpointError, match="input scale") as caught:
        of(case, tmp_path, headers)
    assert caught.value.subject == modules[9]


@pytest.mark.parametrize("case", named("note"))
def test_float_weights_win(case, tmp_path):
    modules = FILE["modules"][case["modules"]]
    headers = {f"{name}.weight": TensorHeader(torch.float32, (256, 256)) for name in modules}
    resolved = of(case, tmp_path, headers)
    assert resolved.schemes == {}
    assert resolved.unquantized == tuple(modules)
    assert any("gguf" in text and "float" in text for text in resolved.decisions)
    headers[f"{modules[3]}.weight"] = TensorHeader(torch.uint8, (256, 256))
    with pytest.raises(CheckpointError, match="gguf"):
        of(case, tmp_path, headers)


@pytest.mark.parametrize("case", named("site"))
def test_only_the_named_projection_stays_float(case, tmp_path):
    resolved = of(case, tmp_path)
    left = {name.rpartition(".")[2] for name in resolved.unquantized}
    assert left == {"lm_head", *case["expect"]["reason_names"]}
    assert "model.layers.0.self_attn.k_proj" in resolved.schemes
