"""Every producer that runs on one device against the oracle."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...core.errors import ConfigError
from ...core.oracle.norm import Normed
from ...core.platform import Platform, detect_platform
from ...core.quant_key import QuantKey
from ...core.quantized_activation import QuantizedActivation
from ...core.route import Route
from ...linear import native
from ...linear.contract import InputContract
from ...linear.outputs import RawRequest, Shrink, new_outputs
from ...linear.shrink import shrink
from ..producers.base import Emission, Produced, Producer, ProducerRequest
from ..producers.eager import EagerProducer, eager_raw, quantize_for
from ..producers.kernel import KernelProducer, NativeProducer
from ..registry import REGISTRY, EntryKey, ProducerRegistry
from .cases import DTYPE, Case, arrangements, cases
from .compare import Found, fill_unwritten, input_text, same_bits, untouched, within_rounding
from .machine import device_name, on_device, parse_device, versions
from .matmuls import Kernel, matmul_kernels, matmul_lines
from .report import SCHEMA_VERSION, Difference, Line, VerifyReport, error_text


def verify(
    device: str = "cpu",
    quick: bool = False,
    *,
    registry: ProducerRegistry = REGISTRY,
    families: Iterable[str] | None = None,
    matmuls: Sequence[Kernel] = (),
) -> VerifyReport:
    """Compare every kernel producer that runs on `device` with the oracle, bit for bit.

    Codes, scales and padding by their bits; raw rows and residuals too, any NaN for any other;
    raw rows that were not asked for must be untouched.  Absorbed shrinks are compared with float64,
    and with the separate shrink by their bits where the same C kernels compute both.

    Args:
        device: "cpu", "cuda" or "cuda:n".
        quick: few shapes and variants; seconds.
        registry: whose producers.
        families: which semantics; None for all.
        matmuls: kernels of base weights to be compared too, as `matmuls.py` says.

    Raises:
        ConfigError: the device is unknown or not there.
    """
    chosen = parse_device(device)
    started = time.perf_counter()
    facts = detect_platform(chosen)
    by_family = _by_family(registry, families)
    lines: list[Line] = []
    with torch.no_grad(), on_device(chosen):
        for family, entries in by_family.items():
            lines += _Family(family, entries, chosen, facts, quick).lines()
        lines += matmul_lines(chosen, facts, quick=quick, kernels=matmuls)
    return VerifyReport(
        schema_version=SCHEMA_VERSION,
        device=str(chosen),
        device_name=device_name(chosen),
        platform=facts,
        versions=versions(),
        quick=quick,
        seconds=round(time.perf_counter() - started, 3),
        lines=tuple(lines),
    )


def verify_all(device: str = "cpu", quick: bool = False) -> VerifyReport:
    """`verify` of all producers and of all matmul kernels.

    Raises:
        ConfigError: the device is unknown or not there.
    """
    return verify(device, quick, matmuls=matmul_kernels())


_Entries = dict[QuantKey, dict[Route, tuple[Producer, ...]]]


def _by_family(registry: ProducerRegistry, families: Iterable[str] | None) -> dict[str, _Entries]:
    wanted = None if families is None else set(families)
    found: dict[str, _Entries] = {}
    for (family, key, route), candidates in registry.entries().items():
        if wanted is None or family in wanted:
            found.setdefault(family, {}).setdefault(key, {})[route] = tuple(
                # The oracle itself, and nothing that only derives from it.
                candidate
                for candidate in candidates
                if type(candidate) is not EagerProducer
            )
    unknown = sorted((wanted or set()) - set(found))
    if unknown:
        known = dict.fromkeys(family for family, _, _ in registry.entries())
        raise ConfigError(
            f"families {', '.join(unknown)}", "have no producers", f"use some of {', '.join(known)}"
        )
    return found


# --- one line ----------------------------------------------------------------------------------


@dataclass
class _Tally:
    """A line in the making."""

    cases: int = 0
    elements: int = 0
    differences: int = 0
    first: Difference | None = None
    refusals: dict[str, None] = field(default_factory=dict)

    def add(self, call: _Call, what: str, found: Found, shape: torch.Size, per: int = 1) -> None:
        self.elements += found.elements
        self.differences += found.differences
        if found.differences and self.first is None:
            self.first = Difference(
                case=call.case.name,
                key=str(call.key),
                what=what,
                index=found.place,
                input=input_text(call.case, what, found.place, shape, per),
                got=found.got,
                wanted=found.wanted,
            )

    def fail(self, call: _Call, error: Exception) -> None:
        self.add(call, "error", Found(0, 1, (), error_text(error), "outputs"), torch.Size())

    def line(self, name: str, family: str, key: QuantKey, route: Route) -> Line:
        refused = tuple(self.refusals)
        verdict = "fail" if self.differences else "pass" if self.cases else "not here"
        absent = verdict == "not here"
        return Line(
            producer=name,
            family=family,
            key=str(key),
            route=str(route),
            verdict=verdict,
            reason=next(iter(refused), f"no cases are known for {family}") if absent else "",
            refused=() if absent else refused,
            cases=self.cases,
            elements=self.elements,
            differences=self.differences,
            first=self.first,
        )


# --- one case ----------------------------------------------------------------------------------


class _Wanted:
    """What the oracle makes of one case; worked out once, for all keys, routes and producers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._contracts: dict[QuantKey, InputContract] = {}
        self._quantized: dict[QuantKey, QuantizedActivation] = {}

    def contract(self, key: QuantKey) -> InputContract:
        """What the consumers of `key` accept."""
        if key not in self._contracts:
            self._contracts[key] = self.case.contract(key)
        return self._contracts[key]

    def quantized(self, key: QuantKey) -> QuantizedActivation:
        """Codes and scale for `key`."""
        if key not in self._quantized:
            emission = Emission(self.contract(key))
            self._quantized[key] = quantize_for(self.raw, emission, "the oracle")
        return self._quantized[key]

    @cached_property
    def normed(self) -> Normed:
        """The raw activation, and the new residual where there is one."""
        return eager_raw(self.case.semantics, self.case.inputs)

    @property
    def raw(self) -> torch.Tensor:
        """The raw activation."""
        return self.normed.out

    @cached_property
    def asked(self) -> torch.Tensor:
        """bool (M,): the rows of the requests that want theirs."""
        rows = self.raw.shape[:-1].numel()
        return self.case.wanted.repeat_interleave(rows // self.case.wanted.shape[0])

    @cached_property
    def exact(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each shrink the float64 products, and those of the magnitudes; (M, width)."""
        return [self._exact(request) for request in self.case.shrinks]

    def _exact(self, request: Shrink) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.raw.reshape(-1, self.raw.shape[-1]).double()
        number, requests = rows.shape[0], request.slots.shape[0]
        slots = request.slots.repeat_interleave(number // requests)
        slot = slots.clamp(min=0)
        index = torch.arange(request.width, dtype=torch.int32, device=rows.device)
        # Rows beyond a rank, and without a slot, are zeros, whatever they hold.
        live = (slots >= 0)[:, None] & (index < request.ranks[slot][:, None])
        picked = torch.where(live, request.starts[slot][:, None] + index, 0)
        pool = request.a.double()
        exact, magnitude = (
            torch.where(live, product.gather(1, picked.long()), 0.0)
            for product in (rows @ pool.mT, rows.abs() @ pool.abs().mT)
        )
        return exact, magnitude

    @cached_property
    def separate(self) -> list[torch.Tensor]:
        """The shrinks as a branch that reads the raw activation computes them."""
        return [shrink(self.raw, request) for request in self.case.shrinks]


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a producer, and what it should make."""

    case: Case
    key: QuantKey
    emission: Emission
    wanted: _Wanted

    def run(self, producer: Producer) -> Produced:
        """Call the producer; a kernel's buffers hold NaN before."""
        semantics, inputs, emission = self.case.semantics, self.case.inputs, self.emission
        if not isinstance(producer, KernelProducer):
            return producer.produce(semantics, inputs, emission)
        title = producer.title(semantics, emission)
        outputs = new_outputs(
            inputs[0], emission.contract, title, raw=emission.raw, shrinks=emission.shrinks
        )
        assert outputs.codes is not None
        buffers = [outputs.codes, *outputs.shrunk]
        if not self.key.static and outputs.scale is not None:
            buffers.append(outputs.scale)
        if outputs.raw is not None:
            buffers.append(outputs.raw.values)
        for buffer in buffers:
            fill_unwritten(buffer)
        # No output, but once freed it is likely to be where a kernel puts its new residual.
        fill_unwritten(torch.empty_like(inputs[0]))
        residual = producer.launch(semantics, inputs, outputs)
        return Produced(outputs.activation(title), residual)


def _compare(call: _Call, producer: Producer, tally: _Tally) -> None:
    """Run one call and enter what differs."""
    made = call.run(producer)
    oracle = call.wanted.quantized(call.key)
    activation, residual = made.activation, call.wanted.normed.residual
    for what, got, wanted in (
        ("codes", activation.codes, oracle.codes),
        ("scale", activation.scale, oracle.scale),
    ):
        tally.add(call, what, same_bits(got, wanted), wanted.shape, call.key.codes_per_byte)
    if residual is not None:
        assert made.residual is not None, "a norm with a residual returned none"
        found = same_bits(made.residual, residual, any_nan=True)
        tally.add(call, "residual", found, residual.shape)
    if call.emission.raw is not None:
        _compare_raw(call, call.emission.raw, producer, made, tally)
    for index, request in enumerate(call.emission.shrinks):
        _compare_shrunk(call, index, request, producer, made, tally)


def _compare_raw(
    call: _Call, request: RawRequest, producer: Producer, made: Produced, tally: _Tally
) -> None:
    assert made.activation.raw is not None, "no raw rows were returned"
    columns = call.wanted.raw.shape[-1]
    got = made.activation.raw.values.reshape(-1, columns)
    wanted = call.wanted.raw.reshape(-1, columns)
    if request.rows is not None and request.compact:
        wanted = wanted[call.wanted.asked]
    elif request.rows is not None:
        asked = call.wanted.asked
        # What a producer that is no kernel leaves there was never filled.
        if isinstance(producer, KernelProducer):
            tally.add(call, "raw row not asked for", untouched(got, ~asked), wanted.shape)
        got = torch.where(asked[:, None], got, wanted)
    tally.add(call, "raw", same_bits(got, wanted, any_nan=True), wanted.shape)


def _compare_shrunk(
    call: _Call, index: int, request: Shrink, producer: Producer, made: Produced, tally: _Tally
) -> None:
    got = made.activation.shrunk_for(request.consumer)
    assert got is not None, f"no shrunk rows for {request.consumer} were returned"
    exact, magnitude = call.wanted.exact[index]
    columns = call.wanted.raw.shape[-1]
    tally.add(call, "shrunk", within_rounding(got, exact, magnitude, columns), got.shape)
    if isinstance(producer, NativeProducer) and _separate_is_native(call, request):
        separate = call.wanted.separate[index]
        found = same_bits(got, separate, any_nan=True)
        tally.add(call, "shrunk", found, separate.shape)


def _separate_is_native(call: _Call, request: Shrink) -> bool:
    return native.shrinks(call.wanted.raw, request.a)


# --- one family --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Family:
    """All entries of one family on one device."""

    name: str
    entries: _Entries
    device: torch.device
    platform: Platform
    quick: bool

    def lines(self) -> list[Line]:
        """Run every case; a line for each entry and producer."""
        tallies: dict[tuple[str, EntryKey], _Tally] = {
            (producer.name, (self.name, key, route)): _Tally()
            for key, routes in self.entries.items()
            for route, producers in routes.items()
            for producer in producers
        }
        for case in cases(self.name, self.device, quick=self.quick):
            wanted = _Wanted(case)
            for plain, routes in self.entries.items():
                for key in (plain, *(arrangements(plain) if case.arranged else ())):
                    for route, producers in routes.items():
                        # Their values reach all routes by the same code.
                        if self.quick and case.large and route != Route.FUSED:
                            continue
                        for producer in producers:
                            tally = tallies[producer.name, (self.name, plain, route)]
                            self._try(producer, wanted, key, route, tally)
        return [tally.line(name, *entry) for (name, entry), tally in tallies.items()]

    def _try(
        self, producer: Producer, wanted: _Wanted, key: QuantKey, route: Route, tally: _Tally
    ) -> None:
        case = wanted.case
        verdict = producer.supports(self._request(case, key, route))
        if not verdict.ok:
            tally.refusals[verdict.reason] = None
            return
        emission = _emission(case, wanted.contract(key), route, tally.cases)
        verdict = producer.accepts(case.semantics, case.inputs, emission)
        if not verdict.ok:
            tally.refusals[verdict.reason] = None
            return
        tally.cases += 1
        call = _Call(case, key, emission, wanted)
        try:
            _compare(call, producer, tally)
        except Exception as error:
            # A kernel that cannot be compiled or launched fails its line, not the report.
            tally.fail(call, error)

    def _request(self, case: Case, key: QuantKey, route: Route) -> ProducerRequest:
        absorbed = route == Route.ABSORBED
        return ProducerRequest(
            case.semantics,
            key,
            route,
            DTYPE,
            case.inputs[0].shape[-1],
            self.platform,
            max(request.rank for request in case.shrinks) if absorbed else 0,
            case.shrinks[0].a.dtype if absorbed else None,
        )


def _emission(case: Case, contract: InputContract, route: Route, turn: int) -> Emission:
    """What one call emits; the kinds of raw rows take turns, so that a line sees all of them."""
    if route == Route.DUAL:
        kinds = (
            RawRequest(case.wanted),
            RawRequest(),
            RawRequest(case.wanted, compact=True),
        )
        return Emission(contract, route, case.name, raw=kinds[turn % len(kinds)])
    shrinks = case.shrinks if route == Route.ABSORBED else ()
    return Emission(contract, route, case.name, shrinks=shrinks)
