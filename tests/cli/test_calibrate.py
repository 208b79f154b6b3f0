"""`branchline calibrate`: what it writes where, and its refusals."""

from __future__ import annotations

import pytest
import torch

from branchline.policies.cost import DeviceCosts, calibration_file
from branchline.policies.cost import measure as measuring
from branchline.policies.cost.measure import Extent

measure = measuring.calibrate


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = Extent(rows=(1, 8), columns=(256,), ranks=(8,), rounds=2)
    monkeypatch.setattr(measuring, "calibrate", lambda device, told: measure(device, small, told))


def test_it_is_stored_in_the_cache_folder_and_told(branchline, tmp_path):
    done = branchline("calibrate")
    assert done.code == 0, done.err
    file = tmp_path / "cache" / "branchline" / "calibration" / "cpu.json"
    assert calibration_file("cpu") == file
    assert str(file) in done.err
    stored = DeviceCosts.load(file)
    for part in (stored.fingerprint.device, stored.fingerprint.digest, "absorbed", "GB/s"):
        assert part in done.out


def test_json_is_all_of_stdout_and_out_names_the_file(branchline, tmp_path):
    done = branchline("calibrate", "--json", "--out", str(tmp_path / "mine.json"))
    assert done.code == 0, done.err
    assert DeviceCosts.model_validate_json(done.out) == DeviceCosts.load(tmp_path / "mine.json")
    assert not calibration_file("cpu").exists()


def test_what_is_measured_is_what_policy_auto_and_the_audit_use(branchline, model_folder):
    calibrated = branchline("calibrate", "--json").json
    done = branchline("audit", str(model_folder), "--policy", "auto", "--json")
    assert done.code == 0, done.err
    assert done.json["device"]["measured"]
    assert done.json["device"]["bandwidth"] == calibrated["bandwidth"]
    reasons = {site["routes"][0]["reason"] for site in done.json["sites"]}
    assert any(" us; " in reason and " token" in reason for reason in reasons), reasons


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:999"])
def test_an_unknown_device_is_refused(branchline, device):
    done = branchline("calibrate", "--device", device)
    assert done.code == 1
    assert f"device '{device}'" in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_refused(branchline):
    done = branchline("calibrate", "--device", "cuda")
    assert done.code == 1
    assert "torch sees no CUDA device" in done.err


def test_a_file_that_cannot_be_written_is_refused(branchline, tmp_path):
    (tmp_path / "file").write_text("")
    done = branchline("calibrate", "--out", str(tmp_path / "file" / "mine.json"))
    assert done.code == 1
    assert "--out" in done.err
