"""Every matmul kernel of quantised weights that runs on one device, against float64.

A producer's bytes are defined, a matmul's are not: the order of its sums is the kernel's own.  So
its output is compared with the exact product of what codes and scales stand for, as near as sums
in float32 come to it, and with itself: a row has the same bytes alone and among any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.oracle import quantize
from ...core.platform import Platform
from ...core.quant_key import QuantKey
from ...core.scheme import SCHEMES, LinearScheme
from ...core.selection import Verdict
from ...linear.contract import InputContract, InputScale
from ...linear.experts.kernels.base import GroupedConfig, QuantizedGroupedKernel
from ...linear.experts.kernels.each import EmulatedExperts, W8A16Experts
from ...linear.experts.kernels.selection import GROUPED_KERNELS
from ...linear.experts.kernels.torch_grouped import TorchScaledExperts
from ...linear.experts.pairs import Pairs
from ...linear.experts.weight import ExpertsWeight
from ...linear.kernels.base import LinearConfig, QuantizedKernel
from ...linear.kernels.emulated import EmulatedLinear
from ...linear.kernels.selection import KERNELS
from ...linear.kernels.torch_scaled import TorchScaledLinear
from ...linear.kernels.w8a16 import W8A16Linear
from ...linear.quantized_weight import code_values
from .cases import DTYPE
from .compare import Found, same_bits, within_sums
from .report import Difference, Line, error_text

LINEAR, EXPERTS = "matmul", "experts' matmul"
#: Multiply by torch what the codes stand for: definitions, not kernels.
_DEFINITIONS = (EmulatedLinear, W8A16Linear, EmulatedExperts, W8A16Experts)
#: A library's: nothing promises that a row's bytes do not depend on how many there are.
_LIBRARY = (TorchScaledLinear, TorchScaledExperts)
_NAME = "verify"
_EXPERTS, _TOP_K = 5, 2
_STATIC_SCALE, _GLOBAL_SCALE = 0.0217, 0.0031

#: (rows, N, K); whole blocks and tiles, and what begins one more.
SHAPES = (
    (1, 256, 512), (3, 128, 128), (17, 384, 256), (65, 256, 1152), (5, 72, 192),
    (33, 200, 144), (4, 17, 300), (2, 1, 16),
)  # fmt: skip
QUICK_SHAPES = ((1, 256, 512), (17, 384, 256), (4, 17, 300))

Kernel = type[QuantizedKernel] | type[QuantizedGroupedKernel]


def matmul_kernels() -> tuple[Kernel, ...]:
    """All that are verified, those of linears first."""
    return tuple(k for k in (*KERNELS, *GROUPED_KERNELS) if not issubclass(k, _DEFINITIONS))


def matmul_lines(
    device: torch.device, platform: Platform, *, quick: bool, kernels: Sequence[Kernel]
) -> Iterator[Line]:
    """A line for each kernel and scheme.

    Args:
        device: where to multiply.
        platform: facts about it.
        quick: a few shapes.
        kernels: of linears and of experts.
    """
    for kernel in kernels:
        for name, scheme in SCHEMES.items():
            tally = _Tally(kernel.name, _family(kernel), name)
            for index, shape in enumerate(QUICK_SHAPES if quick else SHAPES):
                verdict = _serves(kernel, scheme, shape, platform)
                if not verdict.ok:
                    tally.refusals[verdict.reason] = None
                    continue
                case = f"{shape[0]} x {shape[2]} by {shape[1]} channels"
                try:
                    tally.compare(case, _compared(kernel, scheme, shape, device, bias=index % 2))
                except Exception as error:
                    # A kernel that cannot be compiled or launched fails its line, not the report.
                    tally.fail(case, error)
            yield tally.line()


def _family(kernel: Kernel) -> str:
    return EXPERTS if issubclass(kernel, QuantizedGroupedKernel) else LINEAR


def _serves(
    kernel: Kernel, scheme: LinearScheme, shape: tuple[int, int, int], platform: Platform
) -> Verdict:
    linear = LinearConfig(shape[2], shape[1], scheme)
    if issubclass(kernel, QuantizedGroupedKernel):
        return kernel.serves(GroupedConfig(_EXPERTS, linear), platform)
    return kernel.serves(linear, platform)


# --- a line in the making ----------------------------------------------------------------------


@dataclass
class _Tally:
    kernel: str
    family: str
    scheme: str
    cases: int = 0
    elements: int = 0
    differences: int = 0
    first: Difference | None = None
    refusals: dict[str, None] = field(default_factory=dict)

    def compare(self, case: str, found: Iterator[tuple[str, Found]]) -> None:
        self.cases += 1
        for what, one in found:
            self.add(case, what, one)

    def add(self, case: str, what: str, found: Found) -> None:
        self.elements += found.elements
        self.differences += found.differences
        if found.differences and self.first is None:
            self.first = Difference(
                case=case,
                key=self.scheme,
                what=what,
                index=found.place,
                input="the whole call" if what == "error" else "a product of a whole row",
                got=found.got,
                wanted=found.wanted,
            )

    def fail(self, case: str, error: Exception) -> None:
        self.add(case, "error", Found(0, 1, (), error_text(error), "outputs"))

    def line(self) -> Line:
        verdict = "fail" if self.differences else "pass" if self.cases else "not here"
        refused = tuple(self.refusals)
        absent = verdict == "not here"
        return Line(
            producer=self.kernel,
            family=self.family,
            key=self.scheme,
            route="base",
            verdict=verdict,
            reason=refused[0] if absent else "",
            refused=() if absent else refused,
            cases=self.cases,
            elements=self.elements,
            differences=self.differences,
            first=self.first,
        )


# --- one case ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Product:
    """A kernel with made-up weights, and the rows that it is handed.

    Attributes:
        of: the product of some rows (M, K), an output (M or pairs, N).
        x: bfloat16 (M, K).
        weight: float64 (E, N, K), what the codes stand for; one expert of a linear.
        bias: float64 (E, N), or None.
        experts: int64 (M, k), who computes which row; zeros of a linear.
        contract: of the kernel's input.
        isolated: a row's bytes depend on no other.
    """

    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    experts: torch.Tensor
    contract: InputContract
    isolated: bool


def _compared(
    kernel: Kernel,
    scheme: LinearScheme,
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    bias: int,
) -> Iterator[tuple[str, Found]]:
    made = _build(kernel, scheme, shape, device, bias=bool(bias))
    out = made.of(made.x, made.experts)
    exact, magnitude = _exact(made)
    yield "output", within_sums(out, exact, magnitude, shape[2])
    if not made.isolated:
        return
    for row in sorted({0, shape[0] // 2, shape[0] - 1}):
        own = slice(row, row + 1)
        alone = made.of(made.x[own], made.experts[own])
        yield "row alone", same_bits(alone, out[own], any_nan=True)
        # Neighbours that hold NaN, and other numbers of rows for each expert.
        others = torch.full_like(made.x, torch.nan)
        others[own] = made.x[own]
        among = made.of(
            others, made.experts.roll(1, 0).index_copy(0, _at(row, made), made.experts[own])
        )
        yield "row among others", same_bits(among[own], out[own], any_nan=True)


def _at(row: int, made: _Product) -> torch.Tensor:
    return torch.tensor([row], device=made.experts.device)


def _build(
    kernel: Kernel,
    scheme: LinearScheme,
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    bias: bool,
) -> _Product:
    rows, n, k = shape
    grouped = issubclass(kernel, QuantizedGroupedKernel)
    number = _EXPERTS if grouped else 1
    generator = torch.Generator().manual_seed(rows * 10007 + n * 101 + k)
    values = torch.randn(number, n, k, generator=generator).to(device)
    x = (torch.randn(rows, k, generator=generator) * 3).to(DTYPE).to(device)
    b = torch.randn(number, n, generator=generator).to(device) if bias else None
    scores = torch.rand(rows, number, generator=generator)
    chosen = scores.topk(_TOP_K if grouped else 1, 1).indices.to(device)
    weight = ExpertsWeight.from_float(values, _NAME, scheme.weight)
    linear = LinearConfig(k, n, scheme)
    built: Any
    if issubclass(kernel, QuantizedGroupedKernel):
        contract = _contract(kernel.consumes(GroupedConfig(number, linear)), device)
        built = kernel(weight, b, contract)
    else:
        contract = _contract(kernel.consumes(linear), device)
        built = kernel(weight.experts[0], None if b is None else b[0], contract)
    return _Product(
        _grouped(built) if grouped else lambda rows, _: built.apply(rows, _NAME).unsqueeze(1),
        x,
        weight.dequantize().double(),
        None if b is None else b.double(),
        chosen,
        contract,
        not issubclass(kernel, _LIBRARY),
    )


def _grouped(built: QuantizedGroupedKernel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(M, k, N): both ways in which rows lie, by token and by position, in turn of the choices."""

    def product(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        pairs = Pairs.of(experts, built.experts)
        by_token = built.apply(x, pairs, _NAME, by_token=True)
        by_position = built.apply(x[pairs.token], pairs, _NAME, by_token=False)
        out = torch.empty_like(by_token)
        # The same bytes, or the choices of one row differ from their exact values.
        differs = (by_token != by_position) & ~(by_token.isnan() & by_position.isnan())
        out[pairs.order] = torch.where(differs, torch.nan, by_token)
        return out.view(*experts.shape, -1)

    return product


def _contract(key: QuantKey | None, device: torch.device) -> InputContract:
    def scale(value: float) -> InputScale:
        return InputScale.checked(torch.tensor([value], device=device), _NAME)

    if key is None:
        return InputContract(None)
    return InputContract(
        key,
        scale(_STATIC_SCALE) if key.static else None,
        scale(_GLOBAL_SCALE) if key.global_scale else None,
    )


def _exact(made: _Product) -> tuple[torch.Tensor, torch.Tensor]:
    """The products in float64, and the sums of their magnitudes; (M, k, N)."""
    x = _stands_for(made.x, made.contract)
    shape = (*made.experts.shape, made.weight.shape[1])
    exact, magnitude = (x.new_empty(shape) for _ in range(2))
    for choice, experts in enumerate(made.experts.unbind(1)):
        for expert in experts.unique().tolist():
            own, weight = experts == expert, made.weight[expert].t()
            exact[own, choice] = x[own] @ weight
            magnitude[own, choice] = x[own].abs() @ weight.abs()
    if made.bias is not None:
        exact += made.bias[made.experts]
        magnitude += made.bias[made.experts].abs()
    return exact, magnitude


def _stands_for(x: torch.Tensor, contract: InputContract) -> torch.Tensor:
    """float64 (M, K): what the oracle's codes and scales of `x` stand for."""
    key = contract.key
    if key is None:
        return x.double()
    made = quantize(
        x,
        # Layouts move scales and pad, and change no value.
        key.plain(),
        static_scale=None if contract.scale is None else contract.scale.value,
        global_scale=None if contract.global_scale is None else contract.global_scale.value,
        producer=_NAME,
    )
    columns = x.shape[1]
    values, scale = code_values(made.codes)[:, :columns].double(), made.scale.double()
    if key.granularity.size:
        scale = scale.repeat_interleave(key.granularity.size, 1)[:, :columns]
    values = values * scale
    return values if made.global_scale is None else values * made.global_scale.double()
