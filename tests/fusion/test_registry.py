from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from branchline.core.errors import BranchlineError, KernelUnavailableError, RegistryError
from branchline.core.oracle import (
    ACTIVATIONS,
    NORM_ORDERS,
    ActivationSemantics,
    NormSemantics,
)
from branchline.core.platform import Platform
from branchline.core.quant_key import (
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    NVFP4,
    ScaleLayout,
)
from branchline.core.route import Route
from branchline.core.selection import ACCEPTED, Rejection, Verdict
from branchline.fusion.producers.base import Producer, ProducerRequest
from branchline.fusion.registry import REGISTRY, ProducerRegistry

CPU = Platform("cpu", None, "2.13", None, None)


def request(semantics="silu", gated=True, key=FP8_STATIC_TENSOR, route=Route.FUSED):
    return ProducerRequest(
        ActivationSemantics(semantics, gated), key, route, torch.bfloat16, 64, CPU
    )


class Fake(Producer):
    def __init__(self, name: str, reason: str = "") -> None:
        self.name = name
        self.reason = reason
        self.asked = 0

    def supports(self, request: ProducerRequest) -> Verdict:
        self.asked += 1
        return Verdict(not self.reason, self.reason)

    def accepts(self, semantics, inputs, emission) -> Verdict:
        return ACCEPTED

    def produce(self, semantics, inputs, emission):
        raise AssertionError("a choice runs nothing")


def registry_of(*producers: Producer) -> ProducerRegistry:
    registry = ProducerRegistry()
    for producer in producers:
        registry.register("silu_mul", FP8_STATIC_TENSOR, Route.FUSED, producer)
    return registry


def test_the_first_that_accepts_is_chosen_and_later_ones_are_not_asked():
    first, second, third = Fake("a", "needs a GPU"), Fake("b"), Fake("c")
    selection = registry_of(first, second, third).select(request())
    assert selection.producer is second
    assert selection.rejected == (Rejection("a", "needs a GPU"),)
    assert third.asked == 0


def test_order_is_that_of_registration():
    a, b = Fake("a"), Fake("b")
    assert registry_of(a, b).select(request()).producer is a
    assert registry_of(b, a).select(request()).producer is b


def test_the_trace_names_everyone_where_nobody_accepts():
    selection = registry_of(Fake("a", "needs a GPU"), Fake("b", "no C kernels")).select(request())
    assert selection.producer is None
    assert selection.rejected == (Rejection("a", "needs a GPU"), Rejection("b", "no C kernels"))
    for part in ("fused", "silu_mul", "fp8-static-tensor", "runs here"):
        assert part in selection.reason


@pytest.mark.parametrize(
    "other",
    [
        request(key=FP8_DYNAMIC_TOKEN),
        request(key=MXFP8),
        request(route=Route.DUAL),
        request("gelu_tanh"),
        request(gated=False),
        dataclasses.replace(request(), semantics=NormSemantics("llama", 1e-6)),
    ],
    ids=lambda r: f"{r.semantics} {r.key} {r.route}",
)
def test_another_entry_has_no_candidates(other):
    selection = registry_of(Fake("a")).select(other)
    assert selection.producer is None
    assert selection.rejected == ()
    assert "is registered" in selection.reason
    assert str(other.key) in selection.reason
    assert str(other.semantics) in selection.reason


def test_an_unknown_entry_has_no_candidates_and_says_what_there_is():
    registry = registry_of(Fake("a"))
    assert [p.name for p in registry.candidates("silu_mul", FP8_STATIC_TENSOR, Route.FUSED)] == [
        "a"
    ]
    for family, key, route in (
        ("silu_mull", FP8_STATIC_TENSOR, Route.FUSED),
        ("silu_mul", MXFP8, Route.FUSED),
        ("silu_mul", FP8_STATIC_TENSOR, Route.DUAL),
    ):
        with pytest.raises(RegistryError, match=r"not registered.*silu_mul") as caught:
            registry.candidates(family, key, route)
        assert f"{route} producer for {family} -> {key}" in str(caught.value)


def test_layout_and_parameters_are_left_to_the_predicate():
    padded = dataclasses.replace(MXFP8, row_multiple=128, layout=ScaleLayout.SWIZZLE_128X4)
    registry, producer = ProducerRegistry(), Fake("a")
    registry.register("silu_mul", MXFP8, Route.FUSED, producer)
    asked = request(key=padded)
    limited = dataclasses.replace(asked.semantics, limit=7.0)
    assert registry.select(asked).producer is producer
    assert registry.select(dataclasses.replace(asked, semantics=limited)).producer is producer
    with pytest.raises(RegistryError, match="layout"):
        registry.register("silu_mul", padded, Route.FUSED, Fake("b"))


def test_an_equal_key_finds_the_entry():
    key = dataclasses.replace(FP8_STATIC_TENSOR)
    assert registry_of(Fake("a")).select(request(key=key)).producer.name == "a"


# --- forcing (I14) -----------------------------------------------------------------------------


def test_forcing_passes_over_the_others():
    a, b = Fake("a"), Fake("b")
    selection = registry_of(a, b).select(request(), force="b")
    assert selection.producer is b
    assert a.asked == 0
    assert [r.name for r in selection.rejected] == ["a"]
    assert "forced" in selection.rejected[0].reason


def test_forced_but_unavailable_raises_with_its_own_reason():
    with pytest.raises(KernelUnavailableError) as caught:
        registry_of(Fake("a", "needs a GPU"), Fake("b")).select(request(), force="a")
    assert "'a'" in str(caught.value)
    assert "needs a GPU" in str(caught.value)


def test_forcing_what_is_unknown_raises():
    with pytest.raises(KernelUnavailableError, match="tritn"):
        registry_of(Fake("a")).select(request(), force="tritn")


def test_forcing_raises_where_nothing_is_registered_either():
    with pytest.raises(KernelUnavailableError, match="tritn"):
        registry_of(Fake("a")).select(request(key=FP8_DYNAMIC_TOKEN), force="tritn")


# --- registration ------------------------------------------------------------------------------


def test_a_name_is_taken_once_per_entry():
    registry = registry_of(Fake("a"))
    with pytest.raises(RegistryError, match=r"'a'.*already"):
        registry.register("silu_mul", FP8_STATIC_TENSOR, Route.FUSED, Fake("a"))
    registry.register("silu_mul", FP8_STATIC_TENSOR, Route.DUAL, Fake("a"))
    registry.register("silu", FP8_STATIC_TENSOR, Route.FUSED, Fake("a"))
    registry.register("silu_mul", FP8_DYNAMIC_TOKEN, Route.FUSED, Fake("a"))
    assert [len(candidates) for candidates in registry.entries().values()] == [1, 1, 1, 1]


class NoPredicate:
    name = "bare"

    def produce(self, semantics, inputs, scale):
        return inputs[0]


@pytest.mark.parametrize("producer", [NoPredicate(), Fake, lambda *_: None, None])
def test_no_producer_without_a_predicate(producer):
    registry = ProducerRegistry()
    with pytest.raises(RegistryError, match="predicate") as caught:
        registry.register("silu_mul", FP8_STATIC_TENSOR, Route.FUSED, producer)
    assert isinstance(caught.value, BranchlineError)
    assert registry.select(request()).producer is None


@pytest.mark.parametrize("left_out", ["supports", "accepts", "produce"])
def test_a_producer_cannot_leave_a_method_out(left_out):
    methods = {n: getattr(Fake, n) for n in ("supports", "accepts", "produce") if n != left_out}
    cls = type("Partial", (Producer,), {"name": "partial", **methods})
    with pytest.raises(TypeError, match=left_out):
        cls()


def test_entries_are_a_copy():
    registry = registry_of(Fake("a"))
    registry.entries().clear()
    assert len(registry.entries()) == 1


# --- the default registry ----------------------------------------------------------------------


def platforms() -> list[Platform]:
    return [
        CPU,
        Platform("cpu", None, "2.13", "3.6", "avx2"),
        Platform("cpu", None, "2.13", "3.6", "avx2", interpreted=True),
        Platform("cuda", (7, 0), "2.13", None, None),
        Platform("cuda", (8, 9), "2.13", "3.6", None),
        Platform("cuda", (9, 0), "2.13", "3.6", None),
        Platform("cuda", (10, 0), "2.13", "3.6", None),
        Platform("mps", None, "2.13", None, None),
    ]


def test_everything_registered_answers_with_reasons():
    silu = ActivationSemantics("silu", gated=True)
    for (_, key, route), candidates in REGISTRY.entries().items():
        assert len({producer.name for producer in candidates}) == len(candidates)
        for producer, platform in itertools.product(candidates, platforms()):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                verdict = producer.supports(
                    ProducerRequest(silu, key, route, dtype, 64, platform, 16, dtype)
                )
                assert isinstance(verdict, Verdict)
                assert verdict.ok or verdict.reason


def test_every_activation_and_norm_has_producers_for_every_key_and_route():
    families = {f"{name}{suffix}" for name in (*ACTIVATIONS, "custom") for suffix in ("", "_mul")}
    families |= {NormSemantics(order, 1e-6).family for order in NORM_ORDERS}
    routes = (Route.FUSED, Route.DUAL, Route.ABSORBED)
    wanted = set(itertools.product(families, KEYS, routes))
    assert set(REGISTRY.entries()) == wanted
    for candidates in REGISTRY.entries().values():
        assert [producer.name for producer in candidates] == ["triton", "native", "eager"]


def chosen(platform: Platform, **changes) -> tuple[str, tuple[Rejection, ...]]:
    asked = dataclasses.replace(request(), platform=platform, **changes)
    selection = REGISTRY.select(asked)
    return selection.producer.name if selection.producer else "", selection.rejected


CPU_WITH_C = Platform("cpu", None, "2.13", None, "avx2")
HOPPER = Platform("cuda", (9, 0), "2.13", "3.6", None)
BLACKWELL = dataclasses.replace(HOPPER, capability=(10, 0))


def test_the_platform_decides():
    assert chosen(CPU_WITH_C)[0] == "native"
    assert chosen(CPU)[0] == "eager"
    assert chosen(HOPPER)[0] == "triton"
    name, rejected = chosen(HOPPER, key=NVFP4)
    assert name == "eager"
    assert "sm_100 or later for e2m1, the device is sm_90" in rejected[0].reason
    assert chosen(BLACKWELL, key=NVFP4)[0] == "triton"
    name, rejected = chosen(dataclasses.replace(HOPPER, capability=(8, 0)))
    assert name == "eager"
    assert "sm_89 or later for float8e4nv, the device is sm_80" in rejected[0].reason
    name, rejected = chosen(CPU_WITH_C, dtype=torch.float16)
    assert name == "eager"
    assert {r.name for r in rejected} == {"triton", "native"}


@pytest.mark.parametrize("platform", [CPU, CPU_WITH_C, HOPPER], ids=str)
def test_a_rank_beyond_64_is_absorbed_by_nobody(platform):
    absorbed = {"route": Route.ABSORBED, "lora_dtype": torch.bfloat16}
    assert chosen(platform, rank=64, **absorbed)[0]
    name, rejected = chosen(platform, rank=65, **absorbed)
    assert name == ""
    assert [r.name for r in rejected] == ["triton", "native", "eager"]
    assert all("up to 64" in r.reason and "65" in r.reason for r in rejected)


def test_kernels_absorb_only_dtypes_they_know():
    absorbed = {"route": Route.ABSORBED, "rank": 8}
    assert chosen(CPU_WITH_C, lora_dtype=torch.float32, **absorbed)[0] == "native"
    name, rejected = chosen(CPU_WITH_C, lora_dtype=torch.float16, **absorbed)
    assert name == "eager"
    assert "the slots are float16" in rejected[-1].reason
