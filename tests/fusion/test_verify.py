"""The verification itself: it passes here, and finds every kind of fault that is planted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from branchline.core.errors import BranchlineError, ConfigError
from branchline.core.oracle import ActivationSemantics
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    NVFP4,
)
from branchline.core.route import Route
from branchline.core.selection import ACCEPTED, Verdict
from branchline.fusion import REGISTRY, Emission, ProducerRegistry, VerifyReport, verify
from branchline.fusion.producers.eager import EAGER, EagerProducer
from branchline.fusion.producers.kernel import KernelProducer
from branchline.fusion.verify import Line, arrangements, cases
from branchline.fusion.verify.cases import QUICK_SHAPES, SHAPES, encodings, shuffled
from branchline.fusion.verify.compare import (
    fill_unwritten,
    same_bits,
    untouched,
    within_rounding,
)
from branchline.linear.outputs import RawRequest

CPU = torch.device("cpu")
ROUTES = (Route.FUSED, Route.DUAL, Route.ABSORBED)
FAMILIES = ("silu_mul", "layer_norm")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


class Twin(KernelProducer):
    """A kernel that is right, for it copies the oracle's outputs into its buffers; or nearly."""

    name = "twin"
    kernels = "the twin's kernels"

    def __init__(self, fault: str = "", reason: str = "") -> None:
        self.fault = fault
        self.reason = reason

    def supports_platform(self, request) -> Verdict:
        return Verdict(not self.reason, self.reason)

    def accepts_device(self, device_type) -> Verdict:
        return ACCEPTED

    def launch(self, semantics, inputs, outputs):
        raw = outputs.raw and RawRequest(outputs.raw.rows, outputs.raw.compact)
        emission = Emission(outputs.contract, raw=raw, shrinks=outputs.shrinks)
        made = EAGER.produce(semantics, inputs, emission)
        self._write_codes(outputs, made.activation)
        if raw is not None:
            self._write_raw(outputs, made.activation.raw.values)
        for out, request in zip(outputs.shrunk, outputs.shrinks, strict=True):
            out.copy_(made.activation.shrunk[request.consumer])
            if self.fault == "shrink" and out.numel():
                out[0, 0] += 1e-3 * out.abs().max()
        if self.fault == "residual" and made.residual is not None and made.residual.numel():
            bits(made.residual).view(-1)[-1] ^= 1
        return made.residual

    def _write_codes(self, outputs, made) -> None:
        key = outputs.contract.key
        codes, written = bits(outputs.codes), bits(made.codes)
        if self.fault == "raises":
            raise RuntimeError("out of   registers")
        if self.fault == "padding":
            columns = codes.shape[-1]
            codes.view(-1, columns)[: outputs.rows].copy_(
                written.reshape(-1, columns)[: outputs.rows]
            )
        else:
            codes.copy_(written)
        if self.fault == "code" and codes.numel():
            codes.view(-1)[codes.numel() // 2] ^= 1
        if not key.static:
            bits(outputs.scale).copy_(bits(made.scale))
            if self.fault == "scale" and outputs.scale.numel():
                bits(outputs.scale)[..., -1] += 1

    def _write_raw(self, outputs, made: torch.Tensor) -> None:
        values, rows = outputs.raw.values, outputs.raw.rows
        if rows is None or outputs.raw.compact or self.fault == "unasked":
            bits(values).copy_(bits(made))
        else:
            asked = rows.repeat_interleave(outputs.rows // rows.shape[0])
            by_row = values.view(-1, values.shape[-1])
            by_row[asked] = made.reshape(by_row.shape)[asked]
        if self.fault == "raw" and values.numel():
            bits(values).view(-1)[0] ^= 1


def registry_of(
    *producers, families: Sequence[str] = FAMILIES, keys=KEYS, routes=ROUTES
) -> ProducerRegistry:
    registry = ProducerRegistry()
    for family in families:
        for key in keys:
            for route in routes:
                for producer in (*producers, EAGER):
                    registry.register(family, key, route, producer)
    return registry


def failing(report: VerifyReport) -> set[tuple[str, str]]:
    return {(line.key, line.route) for line in report.lines if line.verdict == "fail"}


# --- it passes ---------------------------------------------------------------------------------


def test_the_kernels_of_this_machine_equal_the_oracle():
    report = verify(quick=True, families=["gelu_tanh", "silu_mul", "rms_norm[gemma]"])
    assert report.ok, str(report)
    assert (report.device, report.quick, report.platform.device_type) == ("cpu", True, "cpu")
    native = [line for line in report.lines if line.producer == "native"]
    assert {line.verdict for line in native} == {"pass"}
    assert len(native) == 3 * len(KEYS) * len(ROUTES)
    for line in native:
        assert line.cases > 5
        assert line.first is None
        assert line.refused == ()
        # All encodings by the route that every other is built on.
        assert line.elements > (65536 // 2 if line.route == "fused" else 1000)
    triton = [line for line in report.lines if line.producer == "triton"]
    assert {line.verdict for line in triton} == {"not here"}
    assert {line.reason for line in triton} == {report.absent()[0].removeprefix("triton: ")}
    assert not [line for line in report.lines if line.producer == "eager"]


@pytest.mark.parametrize("family", ["silu_mul", "layer_norm"])
def test_in_full_too(family):
    report = verify(families=[family])
    assert report.ok, str(report)
    assert not report.quick
    least = min(line.elements for line in report.lines if line.verdict == "pass")
    assert least > 4 * 65536 // 2


@pytest.mark.gpu
def test_on_a_gpu():
    report = verify("cuda", quick=True, families=["silu_mul", "layer_norm"])
    assert report.ok, str(report)


def test_a_right_producer_passes_whatever_its_class():
    class Other(EagerProducer):
        name = "other"

    report = verify(quick=True, registry=registry_of(Twin(), Other()))
    assert report.ok, str(report)
    assert {line.producer for line in report.lines} == {"twin", "other"}


def test_every_registry_entry_has_its_line():
    registry = registry_of(Twin(reason="not on Tuesdays"), families=sorted(_families()))
    report = verify(quick=True, registry=registry)
    assert {(line.family, line.key, line.route) for line in report.lines} == {
        (family, str(key), str(route)) for family, key, route in REGISTRY.entries()
    }
    assert {line.verdict for line in report.lines} == {"not here"}


def _families() -> set[str]:
    return {family for family, _, _ in REGISTRY.entries()}


# --- it finds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "what", "keys", "routes"),
    [
        ("code", "codes", KEYS, ROUTES),
        ("scale", "scale", KEYS[1:], ROUTES),
        ("padding", "codes", KEYS, ROUTES),
        ("raw", "raw", KEYS, [Route.DUAL]),
        ("unasked", "raw row not asked for", KEYS, [Route.DUAL]),
        ("shrink", "shrunk", KEYS, [Route.ABSORBED]),
        ("raises", "error", KEYS, ROUTES),
    ],
)
def test_a_fault_is_found_where_it_is_and_nowhere_else(fault, what, keys, routes):
    registry = registry_of(Twin(fault), families=["silu_mul"])
    report = verify(quick=True, registry=registry)
    assert not report.ok
    assert report.verified
    assert failing(report) == {(str(key), str(route)) for key in keys for route in routes}
    first = next(line.first for line in report.lines if line.first)
    assert first.what == what
    assert first.case
    assert first.got != first.wanted
    for part in ("twin silu_mul", first.what, str(keys[0])):
        assert part in str(report)


def test_a_wrong_residual_is_found():
    report = verify(quick=True, registry=registry_of(Twin("residual"), families=["layer_norm"]))
    assert report.count("fail") == len(KEYS) * len(ROUTES)
    assert {line.first.what for line in report.lines} == {"residual"}
    assert "residual=" in report.lines[0].first.input


def test_the_first_difference_names_the_input_and_both_values():
    registry = registry_of(
        Twin("code"), families=["silu_mul"], keys=[FP8_STATIC_TENSOR], routes=[Route.FUSED]
    )
    (line,) = verify(quick=True, registry=registry).lines
    first = line.first
    assert "special values" in first.case
    assert first.input.startswith("gate=")
    assert "up=" in first.input
    assert int(first.got, 16) == int(first.wanted, 16) ^ 1
    # One in every call that has a code at all.
    assert line.differences in (line.cases - 1, line.cases - 2)


def test_a_missing_padding_shows_as_padding():
    registry = registry_of(Twin("padding"), families=["relu"], keys=[MXFP8], routes=[Route.FUSED])
    (line,) = verify(quick=True, registry=registry).lines
    assert (line.first.input, line.first.got, line.first.wanted) == ("padding", "0xFF", "0x00")
    assert "rows%" in line.first.key


def test_one_wrong_producer_does_not_taint_another():
    class Right(Twin):
        name = "right"

    report = verify(quick=True, registry=registry_of(Twin("code"), Right(), families=["relu"]))
    assert {(line.producer, line.verdict) for line in report.lines} == {
        ("twin", "fail"),
        ("right", "pass"),
    }


# --- what does not run -------------------------------------------------------------------------


def test_nothing_verified_is_not_ok():
    report = verify(quick=True, registry=registry_of(Twin(reason="not on Tuesdays")))
    assert not report.verified
    assert not report.ok
    assert report.absent() == ("twin: not on Tuesdays",)
    assert "not on Tuesdays" in str(report)
    empty = verify(quick=True, registry=ProducerRegistry())
    assert empty.lines == ()
    assert not empty.ok


def test_a_refusal_of_some_cases_is_told():
    class NoLimits(Twin):
        def supports(self, request):
            if getattr(request.semantics, "limit", None) is not None:
                return Verdict(False, "limits are not computed")
            return super().supports(request)

    report = verify(quick=True, registry=registry_of(NoLimits(), families=["silu_mul"]))
    assert report.ok
    assert {line.refused for line in report.lines} == {("limits are not computed",)}
    assert "limits are not computed" in str(report)


def test_a_family_without_cases_is_told():
    report = verify(quick=True, registry=registry_of(Twin(), families=["fourier"]))
    assert {line.reason for line in report.lines} == {"no cases are known for fourier"}
    assert not report.ok


@pytest.mark.parametrize("device", ["gpu", "", "cpu:cpu", "meta", "mps", "cuda:999"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ConfigError) as caught:
        verify(device)
    assert isinstance(caught.value, BranchlineError)
    assert repr(device) in caught.value.subject
    assert "cuda" in caught.value.remedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_cuda_is_refused():
    with pytest.raises(ConfigError, match="no CUDA device"):
        verify("cuda")


def test_an_unknown_family_is_refused():
    with pytest.raises(ConfigError, match=r"swish.*silu_mul"):
        verify(families=["swish", "silu"])


# --- its report --------------------------------------------------------------------------------


def test_the_json_is_stable():
    registry = registry_of(Twin("code"), families=["relu"], keys=[NVFP4], routes=[Route.FUSED])
    report = verify(quick=True, registry=registry)
    dumped = report.model_dump(mode="json")
    assert report.schema_version == 1
    assert set(dumped) == {
        "schema_version", "device", "device_name", "platform", "versions", "quick", "seconds",
        "lines",
    }  # fmt: skip
    assert set(dumped["platform"]) == {
        "device_type", "capability", "torch_version", "triton_version", "native_isa",
        "native_reason", "interpreted", "hip", "cuda_version",
    }  # fmt: skip
    assert set(dumped["versions"]) == {"branchline", "python", "cuda"}
    (line,) = dumped["lines"]
    assert set(line) == {
        "producer", "family", "key", "route", "verdict", "reason", "refused", "cases", "elements",
        "differences", "first",
    }  # fmt: skip
    assert set(line["first"]) == {"case", "key", "what", "index", "input", "got", "wanted"}
    assert VerifyReport.model_validate_json(report.model_dump_json()) == report
    with pytest.raises(ValueError, match="frozen"):
        report.lines[0].verdict = "pass"
    assert Line.model_validate(line) == report.lines[0]


# --- its cases ---------------------------------------------------------------------------------


def test_every_width_and_number_of_rows_is_there():
    assert {columns for _, columns in SHAPES} == {
        1, 16, 64, 128, 192, 576, 1368, 3420, 5120, 10240,
    }  # fmt: skip
    assert {rows for rows, _ in SHAPES} == {0, 1, 3, 17, 129, 300}
    assert set(QUICK_SHAPES) < set(SHAPES) | {(1, 1)}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("family", sorted(_families()))
def test_cases_are_what_they_say(family, quick):
    made = list(cases(family, CPU, quick=quick))
    assert {case.semantics.family for case in made} == {family}
    assert len({case.name for case in made}) == len(made)
    assert any(case.arranged for case in made)
    assert any(not x.is_contiguous() for case in made for x in case.inputs)
    assert any(case.inputs[0].dim() > 2 for case in made)
    for case in made:
        assert {x.dtype for x in case.inputs} == {torch.bfloat16}
        rows = case.inputs[0].shape[:-1].numel()
        assert rows % case.wanted.shape[0] == 0
        for request in case.shrinks:
            assert rows % request.slots.shape[0] == 0
            assert request.rank <= request.width <= 64
    semantics = {case.semantics for case in made}
    if isinstance(made[0].semantics, ActivationSemantics):
        if family != "custom":
            assert any(s.limit is not None for s in semantics)
        if not family.startswith("custom"):
            assert any(s.multiplier is not None for s in semantics)
        assert any(s.up_offset is not None for s in semantics) == made[0].semantics.gated
    else:
        assert {s.residual for s in semantics} == {False, True}
        assert {s.bias for s in semantics} == ({False, True} if "layer" in family else {False})


def test_the_same_cases_every_time():
    for first, again in zip(cases("silu_mul", CPU), cases("silu_mul", CPU), strict=True):
        for x, y in zip(first.inputs, again.inputs, strict=True):
            assert torch.equal(bits(x), bits(y))


def test_encodings_are_all_of_them():
    for made in (encodings(), shuffled()):
        assert len(made.view(torch.int16).unique()) == 65536


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_arrangements_are_other_layouts_of_the_same_key(key):
    made = arrangements(key)
    assert len(set(made)) == len(made)
    for arranged in made:
        assert arranged != key
        assert arranged.plain() == key
    layouts = {arranged.layout for arranged in made}
    grouped = key not in (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN) and key.granularity.size
    assert len(layouts) == (3 if grouped else 1)


# --- its comparisons ---------------------------------------------------------------------------


def test_same_bits_tells_zeros_and_nans_apart_unless_told_otherwise():
    x = torch.tensor([0.0, 1.0, torch.nan])
    assert not same_bits(x, x.clone()).differences
    other = x.clone()
    other[0] = -0.0
    found = same_bits(other, x)
    assert (found.differences, found.place) == (1, (0,))
    assert (found.got, found.wanted) == ("-0 (0x80000000)", "0 (0x00000000)")
    payload = x.clone()
    bits(payload)[2] += 1
    assert same_bits(payload, x).differences == 1
    assert not same_bits(payload, x, any_nan=True).differences


def test_same_bits_compares_kinds_first():
    x = torch.zeros(2, 3)
    for other in (x.T, x.bfloat16(), x[:1]):
        found = same_bits(other, x)
        assert found.differences == 1
        assert found.got != found.wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_untouched_sees_one_byte(dtype):
    buffer = torch.zeros(4, 5, dtype=dtype)
    fill_unwritten(buffer)
    rows = torch.tensor([True, False, True, True])
    buffer[1] = 1
    assert not untouched(buffer, rows).differences
    buffer[2, 3] = 1
    assert (untouched(buffer, rows).differences, untouched(buffer, rows).place) == (1, (2, 3))


@pytest.mark.parametrize("terms", [1, 64, 10240])
def test_rounding_is_allowed_and_a_lost_term_is_not(terms):
    generator = torch.Generator().manual_seed(terms)
    x = torch.randn(40, terms, generator=generator).bfloat16()
    a = torch.randn(terms, 8, generator=generator).bfloat16()
    exact, magnitude = x.double() @ a.double(), x.double().abs() @ a.double().abs()
    got = x.float() @ a.float()
    assert not within_rounding(got, exact, magnitude, terms).differences
    in_turn = torch.zeros(40, 8)
    for column in range(terms):
        in_turn += x[:, column, None].float() * a[column].float()
    assert not within_rounding(in_turn, exact, magnitude, terms).differences
    less = got - x[:, -1:].float() * a[-1].float()
    assert within_rounding(less, exact, magnitude, terms).differences > 240
    assert within_rounding(got * torch.nan, exact, magnitude, terms).differences == 320


def test_a_case_is_frozen():
    case = next(cases("relu", CPU))
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.name = "x"
    assert case.contract(FP8_DYNAMIC_GROUP128).scale is None
