"""What is measured, fitted, stored and judged."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from branchline.core.devices import device_spec
from branchline.core.errors import CalibrationError, KernelUnavailableError
from branchline.core.fingerprint import fingerprint_of
from branchline.core.native import load
from branchline.core.platform import detect_platform
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR, NVFP4
from branchline.core.route import Route
from branchline.fusion.registry import ProducerRegistry
from branchline.fusion.traffic import SiteTraffic
from branchline.policies.cost import (
    DeviceCosts,
    RouteCost,
    StoredCosts,
    calibration_file,
    cost_model_for,
    cost_model_of,
)
from branchline.policies.cost import measure as measuring
from branchline.policies.cost.measure import Bench, Case, Extent, cases
from branchline.policies.cost.routes import Timing, fitted

SMALL = Extent(rows=(1, 16), columns=(256,), ranks=(8,), rounds=3)
needs_kernels = pytest.mark.skipif(not load().available, reason="the C kernels are absent")


def traffic(rows: int, columns: int, adapted: int = 0, width: int = 0, key=FP8_STATIC_TENSOR):
    return SiteTraffic(rows, columns, torch.bfloat16, key, adapted, width)


def cost(**changes) -> RouteCost:
    given = {"kind": "activation", "key": str(FP8_STATIC_TENSOR), "route": "dual",
             "call": 1e-5, "element": 3e-10}  # fmt: skip
    return RouteCost(**{**given, **changes})


# --- fitting -----------------------------------------------------------------------------------


def batches(rng: random.Random):
    for _ in range(40):
        rows = rng.choice((1, 8, 64, 512))
        adapted = rng.choice((0, rows))
        yield traffic(rows, rng.choice((512, 4096)), adapted, rng.choice((8, 64)) if adapted else 0)


def test_what_was_made_of_known_numbers_is_found_again():
    rng = random.Random(0)
    truth = cost(adapter_call=4e-6, adapter_element=2e-11, product=1.2e-11)
    timings = [Timing(t, truth.seconds(t) * rng.uniform(0.98, 1.02)) for t in batches(rng)]
    found = fitted("activation", Route.DUAL, timings)
    for fact in ("call", "element", "adapter_call", "product"):
        assert getattr(found, fact) == pytest.approx(getattr(truth, fact), rel=0.15)
    for timing in timings:
        assert found.seconds(timing.traffic) == pytest.approx(timing.seconds, rel=0.06)


def test_no_number_is_negative_even_where_that_would_fit_better():
    shrinking = [Timing(traffic(rows, 512), 1e-5 - rows * 1e-9) for rows in (1, 64, 512)]
    found = fitted("activation", Route.FUSED, shrinking)
    assert found.element == 0
    assert found.call == pytest.approx(1e-5, rel=0.05)


def test_one_timing_is_met():
    found = fitted("norm", Route.FUSED, [Timing(traffic(4, 512), 2e-5)])
    assert found.seconds(traffic(4, 512)) == pytest.approx(2e-5)


# --- measuring ---------------------------------------------------------------------------------


@needs_kernels
def test_this_machine_is_measured_and_stored_and_read_again(tmp_path):
    found = measuring.calibrate("cpu", SMALL)
    named = {(c.kind, c.key, c.route) for c in found.routes}
    assert len(named) == len(found.routes) == 2 * 4 * len(Route)
    assert all(c.seconds(traffic(16, 256)) > 0 for c in found.routes)
    assert 1e8 < found.bandwidth < 1e13
    assert 0 <= found.median_error < 1
    found.save(tmp_path / "deep" / "cpu.json")
    assert DeviceCosts.load(tmp_path / "deep" / "cpu.json") == found
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["cpu.json"]


@needs_kernels
@pytest.mark.parametrize("kind", ["activation", "norm"])
def test_every_route_that_is_measured_does_its_work(kind):
    bench = Bench(torch.device("cpu"), 1)
    case = Case(kind, FP8_STATIC_TENSOR, 8, 256, 8, 16)
    outs = []
    for route in case.routes:
        run = bench.run_of(case, route)
        assert run is not None
        low_rank = next(a for a in run.args if hasattr(a, "out"))
        run()
        assert low_rank.out.any(), route
        outs.append(low_rank.out)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_cases_have_every_route_with_and_without_adapters():
    made = list(cases(Extent()))
    assert {route for case in made for route in case.routes} == set(Route)
    assert len(set(made)) == len(made)


def test_nothing_to_measure_is_refused(monkeypatch):
    monkeypatch.setattr(measuring, "REGISTRY", ProducerRegistry())
    with pytest.raises(KernelUnavailableError, match="no producer runs here that saves anything"):
        measuring.calibrate("cpu", SMALL)


# --- the cost model ----------------------------------------------------------------------------


def calibration(**changes) -> DeviceCosts:
    platform = detect_platform()
    given = {
        "device_type": "cpu", "fingerprint": fingerprint_of(platform), "bandwidth": 2e10,
        "launch_seconds": 1e-5, "median_error": 0.1, "seconds": 1.0,
        "routes": (cost(), cost(key=str(FP8_DYNAMIC_TOKEN), call=2e-5)),
    }  # fmt: skip
    return DeviceCosts(**{**given, **changes})


def test_measured_costs_stand_in_the_place_of_counted_ones():
    model = calibration().model(detect_platform())
    assert model.device.measured
    assert (model.device.bandwidth, model.note) == (2e10, "")
    site = traffic(16, 1000)
    assert model.site_seconds(site, Route.DUAL) == pytest.approx(1e-5 + 16000 * 3e-10)
    # What was not measured is counted from bytes.
    plain = cost_model_for("cpu").site_seconds(site, Route.FUSED)
    counted = model.site_seconds(site, Route.FUSED)
    assert counted > plain


def test_a_key_that_was_not_measured_costs_what_one_alike_does():
    model = calibration().model(detect_platform())
    other = dataclasses.replace(traffic(1, 64), key=NVFP4)
    assert model.site_seconds(other, Route.DUAL) == pytest.approx(2e-5 + 64 * 3e-10)


@pytest.mark.parametrize("kind", ["cpu", "h200", "l40s"])
def test_costs_grow_with_rows_width_and_adapters(kind):
    model = cost_model_for(kind)
    for route in Route:
        few, many = (model.site_seconds(traffic(n, 4096), route) for n in (16, 1024))
        assert 0 < few < many
    assert model.linear_seconds(1, 4096, 4096) < model.linear_seconds(65536, 4096, 4096)
    assert model.linear_seconds(1, 4096, 4096, 2.0) > model.linear_seconds(1, 4096, 4096, 1.0)
    assert model.branch_seconds(8, 4096, 4096, 8) < model.branch_seconds(8, 4096, 4096, 64)
    with_adapters = traffic(64, 4096, 64, 16)
    unfused = model.site_seconds(with_adapters, Route.UNFUSED)
    assert model.site_seconds(with_adapters, Route.ABSORBED) < unfused


# --- stored ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_calibration_that_holds_is_used_by_the_model_of_this_device():
    assert cost_model_of(detect_platform()).note == (
        "datasheet numbers: no calibration of this device, run branchline calibrate"
    )
    calibration().save(calibration_file("cpu"))
    model = cost_model_of(detect_platform())
    assert model.device.measured
    assert model.device.fingerprint == fingerprint_of(detect_platform()).digest


def test_a_stale_one_is_told_with_what_differs():
    here = fingerprint_of(detect_platform())
    other = here.model_copy(update={"threads": 64, "torch": "1.0"})
    calibration(fingerprint=other).save(calibration_file("cpu"))
    stored = StoredCosts.find(detect_platform())
    assert stored.model is None
    for part in ("stale", "threads was 64 and is", "torch was 1.0 and is", "branchline calibrate"):
        assert part in stored.reason


def test_that_of_one_device_is_none_of_another():
    calibration().save(calibration_file("cuda"))
    assert "stale" in StoredCosts.find(device_spec("h200").platform).reason


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 2}', "\x00\xff"])
def test_damaged_ones_are_as_good_as_none_in_the_cache_and_refused_by_name(content, tmp_path):
    file = calibration_file("cpu")
    file.parent.mkdir(parents=True)
    file.write_text(content)
    stored = StoredCosts.find(detect_platform())
    assert stored.model is None
    assert "is no calibration" in stored.reason
    with pytest.raises(CalibrationError, match="is no calibration"):
        StoredCosts.find(detect_platform(), str(file))
    with pytest.raises(CalibrationError, match="cannot be read"):
        StoredCosts.find(detect_platform(), str(tmp_path / "absent.json"))


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="cannot be written"):
        calibration().save(tmp_path / "file" / "cpu.json")
