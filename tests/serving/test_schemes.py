"""Wrapped models under every scheme: what fuses, what disagrees, what a change of scheme does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import branchline
from branchline.core.errors import CalibrationError, ConfigError, KernelUnavailableError
from branchline.core.platform import detect_platform
from branchline.core.route import Route
from branchline.core.scheme import SCHEMES
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.kernels import packed
from branchline.linear.kernels.build import build_kernel
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.quantized_weight import QuantizedWeight
from branchline.serving.config import Quant
from tests.checkpoints import CALIBRATED, PROMPTS, build_wide, quantize
from tests.models import token_ids

CASES = json.loads(
    (Path(__file__).parent.parent / "cases" / "quant_configs.json").read_text(encoding="utf-8")
)
DOWN = "model.layers.0.mlp.down_proj"


def wrapped(scheme: str, family: str = "llama", **settings) -> branchline.ServedModel:
    if scheme in CALIBRATED:
        settings.setdefault("calibration", PROMPTS)
    return branchline.wrap(build_wide(family), quant=scheme, **settings)


def logits(model) -> torch.Tensor:
    return model(input_ids=token_ids(2, 7, seed=3)).logits


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sites_fuse_and_fusing_changes_no_byte(scheme):
    served = wrapped(scheme)
    fused = logits(served)
    kernel = {"nvfp4": "emulated", "fp8-weight-only": "native-w8a16"}.get(scheme, "native-fp8")
    report = served.audit()
    assert {k.name for k in report.kernels} == {kernel, "float"}
    ran = {route for site in report.sites for route in site.ran}
    weight_only = scheme == "fp8-weight-only"
    assert ran == ({"unfused"} if weight_only else {"fused"})
    if weight_only:
        reasons = {route.reason for site in report.sites for route in site.routes}
        assert all("takes no quantised input" in reason for reason in reasons)
    for site in served.discovery.sites:
        site.counters.reset()
    static = wrapped(scheme, policy="static", max_loras=1)
    assert torch.equal(fused, logits(static))
    assert all(set(s.ran) <= {"unfused"} for s in static.audit().sites)


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-block", "mxfp8"])
def test_emulated_and_native_kernels_agree(scheme):
    native = logits(wrapped(scheme)).float()
    emulated = logits(wrapped(scheme, linear_kernel="emulated")).float()
    assert (native - emulated).abs().max() < 0.02 * emulated.abs().max()


def test_a_forced_kernel_that_cannot_run_is_refused_and_undone():
    model = build_wide("llama")
    before = logits(model)
    with pytest.raises(KernelUnavailableError, match=r"torch-scaled-mm|triton"):
        branchline.wrap(model, quant="fp8-dynamic", linear_kernel="triton-rowwise")
    assert torch.equal(logits(model), before)
    with pytest.raises(ConfigError, match="unknown kernel"):
        branchline.wrap(model, linear_kernel="fast")


def test_the_audit_says_what_was_passed_over_and_where_scales_come_from():
    report = wrapped("fp8-static").audit()
    chosen = next(k for k in report.kernels if k.name == "native-fp8")
    assert chosen.scales == ("calibration",)
    assert [r.kernel for r in chosen.rejected] == [
        "torch-scaled-mm",
        "triton-block",
        "triton-rowwise",
    ]
    assert all(r.reason for r in chosen.rejected)
    float_bytes = sum(p.numel() for p in build_wide("llama").parameters()) * 2
    assert 0 < chosen.weight_bytes < float_bytes
    assert "native-fp8" in str(report)
    assert "base kernels passed over" in str(report)


# --- groups that disagree ------------------------------------------------------------------------


def test_one_of_three_unquantised_keeps_the_site_unfused():
    case = next(c for c in CASES["cases"] if c["id"] == "qkv-disagree")
    served = wrapped("fp8-static", ignore=("*q_proj",))
    sites = [s for s in served.audit().sites if "q_proj" in str(s.consumers)]
    assert sites
    assert case["expect"]["fused"] is False
    for site in sites:
        for route in site.routes:
            assert route.route == "unfused"
            for name in case["expect"]["reason_names"]:
                assert name in route.reason


def test_different_scales_of_gate_and_up_keep_the_site_unfused():
    served = wrapped("fp8-static")
    gate, up = (served.registry.layers[f"model.layers.0.mlp.{n}_proj"] for n in ("gate", "up"))
    other = InputScale.checked(gate.kernel.contract.scale.number * 2, "up_proj")
    weight = up.kernel.quantized_weight()
    contract = InputContract(up.kernel.contract.key, other)
    up.kernel = build_kernel(up.name, weight, None, contract, detect_platform())
    plan = served.planner.plan({})
    site = next(s for s in plan.sites if s.site.endswith("layers.0.post_attention_layernorm"))
    assert site.route == Route.UNFUSED
    assert "consumers disagree" in site.reason
    assert "gate_proj" in site.reason
    assert "up_proj" in site.reason
    logits(served)


# --- another scheme at run time ------------------------------------------------------------------


def test_requantizing_advances_the_epoch_and_every_route_follows():
    served = wrapped("fp8-dynamic")
    logits(served)
    epoch = served.registry.epoch
    served.requantize(DOWN, "fp8-block")
    assert served.registry.epoch > epoch
    layer = served.registry.layers[DOWN]
    assert layer.kernel.contract.key == SCHEMES["fp8-block"].input
    site = next(s for s in served.discovery.sites if layer in s.layers)
    site.counters.reset()
    after = logits(served)
    assert site.counters.routes() == {Route.FUSED: 1}
    expected = QuantizedWeight.from_float(layer.original.weight, DOWN, SCHEMES["fp8-block"].weight)
    assert torch.equal(layer.kernel.quantized_weight().dequantize(), expected.dequantize())

    served.requantize(DOWN, "fp8-weight-only")
    site.counters.reset()
    logits(served)
    assert site.counters.routes() == {Route.UNFUSED: 1}
    served.requantize(DOWN, "none")
    assert layer.kernel.name == "float"
    served.requantize(DOWN, "fp8-block")
    assert torch.equal(logits(served), after)


def test_siblings_follow_a_requantized_layer():
    served = wrapped("fp8-dynamic")
    names = [f"model.layers.0.self_attn.{n}_proj" for n in "qkv"]
    kernels = [served.registry.layers[name].kernel for name in names]
    assert kernels[0].group == tuple(kernels)
    served.requantize(names[0], "fp8-block")
    assert kernels[1].group == tuple(kernels[1:])
    assert len(served.registry.layers[names[0]].kernel.group) == 1
    logits(served)


def test_a_scheme_that_needs_ranges_is_refused_without_them():
    served = wrapped("fp8-dynamic")
    with pytest.raises(CalibrationError, match="ranges"):
        served.requantize(DOWN, "fp8-static")
    with pytest.raises(ConfigError, match="quant"):
        served.requantize(DOWN, "int4")
    with pytest.raises(ConfigError, match="routed linear"):
        served.requantize("nobody", "fp8-block")
    static = wrapped("fp8-static")
    static.requantize(DOWN, "nvfp4")
    assert static.registry.layers[DOWN].kernel.name == "emulated"
    logits(static)


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    build_wide("llama").save_pretrained(root / "float")
    quantize(root / "float", root / "fp8", "fp8-dynamic")
    return root / "fp8"


def test_wrapping_a_checkpoint_takes_its_weights_and_unwrapping_gives_them_back(checkpoint):
    model = branchline.load_model(checkpoint)
    module = model.get_submodule(DOWN)
    codes = module.quantized_weight().codes.clone()
    served = branchline.wrap(model)
    with pytest.raises(branchline.BranchlineError, match="taken by a kernel"):
        module.quantized_weight()
    first = logits(served)
    report = served.audit()
    assert report.checkpoint is not None
    assert report.checkpoint.decisions
    assert served.unwrap() is model
    assert model.get_submodule(DOWN) is module
    back = module.quantized_weight().codes
    assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(logits(branchline.wrap(model)), first)


def test_settings_that_a_checkpoint_has_answered_are_refused_and_undone(checkpoint):
    model = branchline.load_model(checkpoint)
    for settings in ({"quant": "fp8-block"}, {"quantize_lm_head": True}, {"ignore": ("*q_proj",)}):
        with pytest.raises(ConfigError, match="quantised already"):
            branchline.wrap(model, **settings)
        model.get_submodule(DOWN).quantized_weight()
    with pytest.raises(ConfigError, match="quantised checkpoint"):
        branchline.wrap(model, calibration=PROMPTS)
    logits(branchline.wrap(model))


def test_a_checkpoint_is_requantized_from_its_own_values(checkpoint):
    served = branchline.wrap(branchline.load_model(checkpoint))
    layer = served.registry.layers[DOWN]
    values = layer.kernel.quantized_weight().dequantize()
    served.requantize(DOWN, "fp8-block")
    expected = QuantizedWeight.from_float(values, DOWN, SCHEMES["fp8-block"].weight)
    assert torch.equal(layer.kernel.quantized_weight().dequantize(), expected.dequantize())
    with pytest.raises(ConfigError, match="holds codes"):
        served.requantize(DOWN, "none")


def test_emulated_scales_do_not_overflow_where_their_product_does_not():
    scheme = SCHEMES["fp8-block"]
    weight = QuantizedWeight.from_float(torch.full((64, 128), 1e-6), "w", scheme.weight)
    x = torch.full((1, 128), 3e38)
    out = EmulatedLinear(weight, None, InputContract(scheme.input)).apply(x, "w")
    assert bool(out.isfinite().all())


def test_a_wrap_that_is_interrupted_loses_no_weight(checkpoint, monkeypatch):
    model = branchline.load_model(checkpoint)
    calls = 0
    pack = packed.pack_codes

    def interrupted(codes):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return pack(codes)

    monkeypatch.setattr(packed, "pack_codes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        branchline.wrap(model)
    monkeypatch.setattr(packed, "pack_codes", pack)
    logits(branchline.wrap(model))


def test_a_loaded_checkpoint_is_not_saved_or_cast_without_its_codes(checkpoint, tmp_path):
    model = branchline.load_model(checkpoint)
    for action in (
        lambda: model.save_pretrained(tmp_path / "lost"),
        model.state_dict,
        lambda: model.to(torch.float16),
        model.half,
    ):
        with pytest.raises(branchline.BranchlineError, match=r"codes"):
            action()


def test_an_unwrapped_model_is_requantized_no_more():
    served = wrapped("fp8-dynamic")
    served.unwrap()
    with pytest.raises(ConfigError, match="unwrapped"):
        served.requantize(DOWN, "fp8-block")


def test_every_scheme_can_be_asked_for():
    assert set(Quant) - {Quant.NONE} == set(SCHEMES)
