"""`branchline verify`: exit codes, the table, JSON and refusals."""

from __future__ import annotations

import pytest
import torch

from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, KEYS
from branchline.core.route import Route
from branchline.core.selection import Verdict
from branchline.fusion import REGISTRY, ProducerRegistry, VerifyReport, verify
from branchline.fusion.producers.base import Produced
from branchline.fusion.producers.eager import EagerProducer


class WrongScale(EagerProducer):
    name = "wrong"

    def produce(self, semantics, inputs, emission):
        made = super().produce(semantics, inputs, emission)
        made.activation.scale.mul_(2)
        return Produced(made.activation, made.residual)


class Absent(EagerProducer):
    name = "absent"

    def supports(self, request):
        return Verdict(False, "needs a moon")


@pytest.fixture
def registered(monkeypatch):
    def register(*producers) -> None:
        registry = ProducerRegistry()
        for producer in producers:
            registry.register("silu_mul", FP8_DYNAMIC_TOKEN, Route.FUSED, producer)
        monkeypatch.setattr(
            "branchline.cli.verify.run",
            lambda device, quick: verify(device, quick, registry=registry),
        )

    return register


def test_the_kernels_of_this_machine_pass_and_json_is_all_of_stdout(branchline):
    done = branchline("verify", "--quick", "--json")
    assert done.code == 0, done.err
    assert "verifying the kernels on cpu" in done.err
    report = VerifyReport.model_validate_json(done.out)
    assert report.quick
    assert report.ok
    assert report.seconds > 0
    native = [line for line in report.lines if line.producer == "native"]
    assert {line.verdict for line in native} == {"pass"}
    entries = {(line.family, line.key, line.route) for line in native}
    assert entries == {(family, str(key), str(route)) for family, key, route in REGISTRY.entries()}
    assert len({line.key for line in native}) == len(KEYS)


def test_the_table_says_what_equals_and_what_is_not_here(branchline, registered):
    class Right(EagerProducer):
        name = "right"

    registered(Right(), Absent())
    done = branchline("verify", "--quick")
    assert done.code == 0, done.err
    for part in ("1 entries equal", "right", "silu_mul", "needs a moon", torch.__version__):
        assert part in done.out


def test_a_wrong_producer_is_found(branchline, registered):
    registered(WrongScale())
    done = branchline("verify", "--quick")
    assert done.code == 1
    assert "wrong silu_mul -> fp8-dynamic-token, fused" in done.out
    assert "scale at [0, 0]" in done.out
    assert "1 entries differ" in done.err
    done = branchline("verify", "--quick", "--json")
    assert done.code == 1
    (line,) = done.json["lines"]
    assert (line["producer"], line["verdict"], line["first"]["what"]) == ("wrong", "fail", "scale")


def test_nothing_to_verify_is_a_failure_with_the_reasons(branchline, registered):
    registered(Absent())
    done = branchline("verify", "--quick", "--json")
    assert done.code == 1
    assert done.json["lines"][0]["verdict"] == "not here"
    assert done.err.splitlines()[-1].startswith("error: verify on cpu: no kernel runs here")
    assert "absent: needs a moon" in done.err


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:999"])
def test_an_unknown_device_is_refused(branchline, device):
    done = branchline("verify", "--device", device)
    assert done.code == 1
    assert done.out == ""
    assert f"error: device '{device}'" in done.err
    assert "pass cpu, cuda or cuda:N" in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_cuda_is_refused(branchline):
    done = branchline("verify", "--device", "cuda", "--json")
    assert done.code == 1
    assert done.out == ""
    assert "torch sees no CUDA device" in done.err
