"""What is told of a quantised checkpoint: numbers by scheme, leftovers, and shapes that misfit."""

from __future__ import annotations

import pytest
import torch

from branchline.core.errors import CheckpointError, ScaleError
from branchline.linear.checkpoint.describe import check_shapes, describe_quant
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
    positive,
    read,
)

N, K = SHAPE
SHAPES = dict.fromkeys(LINEARS, SHAPE)
BLOCKS = (2, 2)


def blockwise(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return checkpoint(weight=codes(N, K), weight_scale_inv=positive(*BLOCKS), **more)


def test_linears_and_bytes_are_counted_by_scheme(tmp_path):
    found = read(tmp_path, fp8())
    tensors = headers(blockwise())
    summary = describe_quant(found, tensors, found.resolve(LINEARS, tensors))
    assert (summary.method, summary.source) == ("fp8", "config.json: quantization_config")
    (scheme,) = summary.schemes
    assert scheme.scheme == summary.says[0]
    assert scheme.scheme.startswith("fp8-block128x128 x ")
    assert scheme.linears == (Q, GATE_PROJ)
    assert scheme.nbytes == 2 * (N * K + 4 * 2 * 2)
    assert summary.unquantized == (ROUTER, HEAD)
    assert summary.unmatched == ()
    assert summary.kv_cache_scales == 0


def test_two_schemes_are_two_entries(tmp_path):
    config = ct({"strategy": "channel"}, {"strategy": "token", "dynamic": True})
    other = ct({"strategy": "tensor"})["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**other, "targets": [Q]}
    found = read(tmp_path, config)
    tensors = {
        **layer(Q, weight=codes(N, K), weight_scale=positive(1)),
        **layer(GATE_PROJ, weight=codes(N, K), weight_scale=positive(N, 1)),
        **float_layers(ROUTER, HEAD),
    }
    summary = describe_quant(found, headers(tensors), found.resolve(LINEARS, headers(tensors)))
    sizes = {scheme.linears: scheme.nbytes for scheme in summary.schemes}
    assert sizes == {(Q,): N * K + 4, (GATE_PROJ,): N * K + 4 * N}


def test_four_bit_codes_count_half_a_byte(tmp_path):
    config = ct({"num_bits": 4, "strategy": "tensor_group", "group_size": 16})
    config["format"] = "nvfp4-pack-quantized"
    found = read(tmp_path, config)
    tensors = headers(
        checkpoint(
            weight_packed=torch.zeros(N, K // 2, dtype=torch.uint8),
            weight_scale=positive(N, K // 16).to(torch.float8_e4m3fn),
            weight_global_scale=positive(1),
        )
    )
    summary = describe_quant(found, tensors, found.resolve(LINEARS, tensors))
    assert summary.schemes[0].nbytes == 2 * (N * K // 2 + N * K // 16 + 4)


def test_the_kv_cache_and_idle_entries_are_told(tmp_path):
    config = fp8(modules_to_not_convert=["lm_head", "mlp.gate", "vision"], kv_cache_scheme={"a": 1})
    found = read(tmp_path, config)
    tensors = headers(blockwise(k_scale=positive(1)))
    summary = describe_quant(found, tensors, found.resolve(LINEARS, tensors))
    assert summary.unmatched == ("vision",)
    assert summary.kv_cache_scales == 2
    assert any("kv_cache_scheme is not used" in line for line in summary.decisions)


def test_of_a_contradiction_the_metadata_is_left(tmp_path):
    found = read(tmp_path, fp8(kv_cache_scheme={"a": 1}))
    summary = describe_quant(found, headers(blockwise()), None)
    assert summary.says[0].startswith("fp8-block128x128")
    assert summary.schemes == summary.unquantized == ()
    assert "kv_cache_scheme" in summary.decisions[0]


def resolved(tmp_path, tensors):
    return read(tmp_path, fp8()).resolve(LINEARS, headers(tensors))


def test_shapes_that_fit(tmp_path):
    tensors = blockwise()
    check_shapes(resolved(tmp_path, tensors), headers(tensors), SHAPES)


def test_dimensions_of_size_one_do_not_count(tmp_path):
    found = read(tmp_path, ct())
    for shape in ((), (1,), (1, 1)):
        tensors = headers(checkpoint(weight=codes(N, K), weight_scale=positive(*shape)))
        check_shapes(found.resolve(LINEARS, tensors), tensors, SHAPES)


@pytest.mark.parametrize("shape", [(K, N), (N + 1, K), (N, K, 1)])
def test_codes_of_another_models_shape(tmp_path, shape):
    tensors = headers(blockwise())
    tensors[f"{GATE_PROJ}.weight"] = tensors[f"{GATE_PROJ}.weight"]._replace(shape=shape)
    found = read(tmp_path, fp8()).resolve(LINEARS, tensors)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj: its weight has shape"):
        check_shapes(found, tensors, SHAPES)


def test_scales_of_another_shape(tmp_path):
    tensors = checkpoint(weight=codes(N, K), weight_scale_inv=positive(2, 3))
    with pytest.raises(ScaleError, match=r"q_proj: its weight scale has shape \(2, 3\).*\(2, 2\)"):
        check_shapes(resolved(tmp_path, tensors), headers(tensors), SHAPES)
