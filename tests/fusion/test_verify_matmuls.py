"""The verification of matmuls: kernels of this machine pass, planted faults are found."""

from __future__ import annotations

import importlib

import pytest
import torch

from branchline.core.scheme import SCHEMES
from branchline.core.selection import Verdict
from branchline.fusion import ProducerRegistry, verify
from branchline.fusion.verify import verify_all
from branchline.fusion.verify.matmuls import EXPERTS, LINEAR, QUICK_SHAPES, matmul_kernels
from branchline.linear.experts.kernels.native_fp8 import NativeFp8Experts
from branchline.linear.kernels.emulated import EmulatedLinear
from branchline.linear.kernels.native_fp8 import NativeFp8Linear

NO_PRODUCERS = ProducerRegistry()


def run(*kernels, quick: bool = True):
    return verify("cpu", quick, registry=NO_PRODUCERS, matmuls=kernels)


def test_the_matmuls_of_this_machine_are_near_float64_and_keep_rows_apart():
    report = run(*matmul_kernels())
    assert report.ok, str(report)
    here = {(line.producer, line.family, line.key) for line in report.lines if line.cases}
    coded = {"fp8-static", "fp8-dynamic", "fp8-block", "fp8-block-ue8m0", "mxfp8"}
    assert here == {
        (name, family, key)
        for family in (LINEAR, EXPERTS)
        for name, keys in (("native-fp8", coded), ("native-w8a16", {*coded, "fp8-weight-only"}))
        for key in keys
    }
    for line in report.lines:
        assert line.route == "base"
        assert line.cases in (0, len(QUICK_SHAPES))
        # Every output, and rows by themselves beside it.
        assert not line.cases or line.elements > sum(m * n for m, n, _ in QUICK_SHAPES)
        assert line.cases or line.reason
    absent = {line.producer for line in report.lines if not line.cases}
    assert {"torch-scaled-mm", "triton-block", "triton-rowwise"} <= absent


@pytest.mark.parametrize("kernel", [NativeFp8Linear, NativeFp8Experts])
def test_in_full_too(kernel):
    report = run(kernel, quick=False)
    assert report.ok, str(report)
    assert max(line.cases for line in report.lines) > len(QUICK_SHAPES)


@pytest.mark.gpu
def test_on_a_gpu():
    report = verify("cuda", True, registry=NO_PRODUCERS, matmuls=matmul_kernels())
    assert report.ok, str(report)


class _Loses(NativeFp8Linear):
    """Leaves one column of K out."""

    def apply(self, x, consumer):
        x = x.clone()
        x[:, -1] = 0
        return super().apply(x, consumer)


class _Rounds(NativeFp8Linear):
    """The last bit of a row depends on how many there are."""

    def apply(self, x, consumer):
        out = super().apply(x, consumer)
        # Not where one row is all there is: that would be a wrong output.
        if len(x) == 1 and self.in_features != QUICK_SHAPES[0][2]:
            out.view(torch.int16).bitwise_xor_(1)
        return out


class _Leaks(NativeFp8Linear):
    """What other rows hold reaches a row."""

    def apply(self, x, consumer):
        out = super().apply(x, consumer)
        return out + 0 * out.sum(0, keepdim=True) if len(x) > 1 else out


class _Raises(NativeFp8Linear):
    def apply(self, x, consumer):
        raise RuntimeError("out of   registers")


class _WrongExpert(NativeFp8Experts):
    """The first expert's pairs are multiplied by what is the second's."""

    def apply(self, x, pairs, consumer, *, by_token):
        out = super().apply(x, pairs, consumer, by_token=by_token)
        begin, end = pairs.bounds[:2]
        out[begin:end] *= 1.1
        return out


class _ByPosition(NativeFp8Experts):
    """Takes rows by position for rows by token."""

    def apply(self, x, pairs, consumer, *, by_token):
        out = super().apply(x, pairs, consumer, by_token=by_token)
        return out if by_token else out.roll(1, 0)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (_Loses, "output"),
        (_Rounds, "row alone"),
        (_Leaks, "row among others"),
        (_Raises, "error"),
        (_WrongExpert, "output"),
        (_ByPosition, "output"),
    ],
)
def test_a_fault_is_found(kernel, what):
    report = run(kernel, NativeFp8Linear)
    failing = [line for line in report.lines if line.verdict == "fail"]
    right = [line for line in report.lines if line.verdict == "pass"]
    # One line a scheme that it serves; the kernel beside it is right.
    assert len(failing) == len(right) == 5
    assert {line.first.what for line in failing} == {what}
    assert {line.first.key for line in failing} == {line.key for line in failing} <= set(SCHEMES)
    assert all(line.first.got != line.first.wanted for line in failing)


def test_what_a_kernel_refuses_is_told():
    class Odd(NativeFp8Linear):
        @classmethod
        def can_implement(cls, config):
            if config.out_features % 2:
                return Verdict(False, "an odd number of channels")
            return super().can_implement(config)

    report = run(Odd)
    refused = {line.refused for line in report.lines if line.cases}
    assert refused == {("an odd number of channels",)}
    assert "an odd number of channels" in str(report)


def test_definitions_are_not_compared_with_themselves():
    assert EmulatedLinear not in matmul_kernels()
    names = {(kernel.name, kernel.__name__) for kernel in matmul_kernels()}
    assert len(names) == 10


def test_all_is_producers_and_matmuls(monkeypatch):
    calls = []
    # The package's attribute of that name is the function.
    module = importlib.import_module("branchline.fusion.verify.run")
    monkeypatch.setattr(module, "verify", lambda *args, **more: calls.append((args, more)))
    verify_all("cpu", True)
    assert calls == [(("cpu", True), {"matmuls": matmul_kernels()})]
