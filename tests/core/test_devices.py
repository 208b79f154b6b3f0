from __future__ import annotations

import dataclasses

import pytest
import torch

from branchline.core.devices import DEVICE_KINDS, device_spec, nearest_spec
from branchline.core.errors import ConfigError
from branchline.core.fingerprint import DeviceFingerprint, fingerprint_of
from branchline.core.oracle import ActivationSemantics
from branchline.core.platform import detect_platform
from branchline.core.quant_key import FP8_STATIC_TENSOR
from branchline.core.route import Route
from branchline.fusion.producers.base import ProducerRequest
from branchline.fusion.registry import REGISTRY


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_every_kind_has_plausible_numbers_and_a_platform(kind):
    spec = device_spec(kind)
    assert spec.kind == kind
    assert 50e9 < spec.bandwidth < 20e12
    assert spec.bf16_flops <= spec.fp8_flops <= 1e16
    assert 1e-7 < spec.launch_seconds < 1e-4
    assert not spec.measured
    assert (spec.platform.capability is None) == (kind == "cpu")


@pytest.mark.parametrize("kind", [kind for kind in DEVICE_KINDS if kind != "cpu"])
def test_producers_are_chosen_for_devices_that_are_not_here(kind):
    request = ProducerRequest(
        ActivationSemantics("silu", gated=True), FP8_STATIC_TENSOR, Route.FUSED,
        torch.bfloat16, 4096, device_spec(kind).platform,
    )  # fmt: skip
    producer = REGISTRY.select(request).producer
    assert producer is not None
    assert producer.name == "triton"


def test_unknown_kinds_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        device_spec("h300")
    for kind in ("h300", *DEVICE_KINDS):
        assert kind in str(caught.value)


def test_the_nearest_device_is_one_of_the_same_capability():
    assert nearest_spec(device_spec("b200").platform).kind == "b200"
    assert nearest_spec(device_spec("h200").platform).bandwidth >= 3e12
    assert nearest_spec(detect_platform()).kind == "cpu"
    odd = dataclasses.replace(device_spec("h100").platform, capability=(9, 9))
    assert nearest_spec(odd).platform.capability == (9, 9)


HERE = DeviceFingerprint(
    device="A CPU", capability="", isa="avx2", threads=2, torch="2.13", triton="", branchline="0.1"
)


@pytest.mark.parametrize(
    ("fact", "value", "told"),
    [
        ("device", "B CPU", "device was A CPU and is B CPU"),
        ("isa", "avx512", "isa was avx2 and is avx512"),
        ("threads", 8, "threads was 2 and is 8"),
        ("torch", "2.14", "torch was 2.13 and is 2.14"),
        ("triton", "3.9", "triton was none and is 3.9"),
        ("branchline", "0.2", "branchline was 0.1 and is 0.2"),
        ("capability", "9.0", "capability was none and is 9.0"),
    ],
)
def test_every_fact_that_differs_is_told(fact, value, told):
    other = HERE.model_copy(update={fact: value})
    assert HERE.differences(other) == (told,)
    assert HERE.differences(HERE) == ()
    assert other.digest != HERE.digest


def test_the_fingerprint_of_this_machine_follows_its_threads():
    platform = detect_platform()
    found = fingerprint_of(platform)
    assert found == fingerprint_of(platform)
    assert found.device
    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert fingerprint_of(platform).differences(found) == (
            f"threads was {before + 1} and is {before}",
        )
    finally:
        torch.set_num_threads(before)
