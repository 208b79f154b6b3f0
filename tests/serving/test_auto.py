"""Policy `auto` in a wrapped model: the same bytes, other routes by the size of the batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from branchline.core.fingerprint import fingerprint_of
from branchline.core.platform import detect_platform
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from branchline.core.route import Route
from branchline.policies.cost import DeviceCosts, RouteCost
from branchline.serving.self_check import check_numerics
from tests.models import token_ids

NAMES = ["attn", "mlp", None, "all"]
#: Seconds of a call, and of an element: few tokens are absorbed, more dual, and most unfused.
COSTS = {
    Route.UNFUSED: (40e-6, 0.0),
    Route.FUSED: (1e-6, 9e-9),
    Route.DUAL: (10e-6, 3e-9),
    Route.ABSORBED: (1e-6, 9e-9),
}


@pytest.fixture
def calibrated(tmp_path) -> str:
    platform = detect_platform()
    routes = tuple(
        RouteCost(kind=kind, key=str(key), route=str(route), call=call, element=element)
        for kind in ("activation", "norm")
        for key in (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN)
        for route, (call, element) in COSTS.items()
    )
    file = tmp_path / "calibration.json"
    DeviceCosts(
        device_type="cpu", fingerprint=fingerprint_of(platform), bandwidth=2e10,
        launch_seconds=1e-6, routes=routes, median_error=0.0, seconds=1.0,
    ).save(file)  # fmt: skip
    return f"auto:calibration={file}"


def ran(served) -> Counter[Route]:
    found: Counter[Route] = Counter()
    for site in served.discovery.sites:
        found.update(site.counters.routes())
        assert not site.counters.fallbacks()
        site.counters.reset()
    return found


@pytest.mark.parametrize("quant", ["fp8-static", "fp8-dynamic"])
def test_bytes_are_those_of_static_whatever_the_size(llama, calibrated, quant):
    auto = llama.served(policy=calibrated, quant=quant)
    saved = {"calibration": auto.calibration} if auto.calibration else {}
    static = llama.served(policy="static", quant=quant, **saved)
    seen = []
    for each in (1, 8, 60, 300):
        ids, tokens = token_ids(1, each * len(NAMES), seed=each), [each] * len(NAMES)
        logits = []
        for model in (auto, static):
            with model.adapters.rows(NAMES, tokens=tokens):
                logits.append(model(input_ids=ids, use_cache=False).logits)
        assert torch.equal(*(one.view(torch.uint8) for one in logits))
        seen.append(set(ran(auto)))
        assert set(ran(static)) == {Route.UNFUSED}
    assert seen[0] == {Route.ABSORBED}
    assert seen[1] == {Route.DUAL}
    assert seen[-1] == {Route.UNFUSED}


def test_the_audit_tells_the_numbers_of_the_batches_it_counts(llama, calibrated):
    served = llama.served(policy=calibrated)
    for tokens, route in ((4, "absorbed"), (4096, "unfused")):
        report = served.audit([["all"]], tokens=tokens)
        for site in report.sites:
            (planned,) = site.routes
            assert planned.route == route
            assert f"at {tokens} tokens, 8/8 of them with adapters" in planned.reason
    assert report.policy == calibrated


def test_the_self_check_compares_every_route_that_a_batch_may_take(llama, calibrated):
    served = llama.served(policy=calibrated)
    routes = {name: check_numerics(llama.served(policy=name)) for name in ("dynamic", "absorbed")}
    report = check_numerics(served)
    assert not report.differences
    assert report.routes > routes["absorbed"].routes > routes["dynamic"].routes
