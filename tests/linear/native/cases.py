"""What the C kernels are compared on, and how."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from branchline.core import native as library
from branchline.core import oracle
from branchline.core.oracle import ActivationSemantics, NormSemantics
from branchline.core.oracle.activation import define_custom
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    NVFP4,
    Granularity,
    QuantKey,
    ScaleLayout,
)
from branchline.linear import native
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.outputs import Outputs, Shrink, new_outputs

#: A machine without the library fails here, for it has no compiler.
ISAS = ("scalar", "avx2", "avx512", "amx")[: library.load().functions.bl_best_isa() + 1]
BF16 = torch.bfloat16
SCALE, GLOBAL_SCALE = 0.0371, 0.0123
IDENTITY = ActivationSemantics("identity", gated=False)

MXFP8_FLOAT = replace(MXFP8, scale_dtype=torch.float32)
#: Every key that kernels see: those with a name, then layouts, padding and other groups.
ALL_KEYS = (
    *KEYS,
    replace(FP8_STATIC_TENSOR, row_multiple=4),
    replace(FP8_DYNAMIC_TOKEN, row_multiple=128),
    replace(FP8_DYNAMIC_GROUP128, layout=ScaleLayout.COLUMN_MAJOR),
    replace(FP8_DYNAMIC_GROUP128, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=4),
    replace(FP8_DYNAMIC_GROUP128, scale_multiple=4),
    replace(FP8_DYNAMIC_GROUP128, granularity=Granularity("group", 7)),
    replace(FP8_DYNAMIC_GROUP128, granularity=Granularity("group", 48), row_multiple=4),
    MXFP8_FLOAT,
    replace(MXFP8, layout=ScaleLayout.SWIZZLE_128X4),
    replace(MXFP8, layout=ScaleLayout.COLUMN_MAJOR, row_multiple=4, scale_multiple=4),
    replace(MXFP8_FLOAT, layout=ScaleLayout.SWIZZLE_128X4, row_multiple=128),
    replace(NVFP4, layout=ScaleLayout.SWIZZLE_128X4),
    replace(NVFP4, scale_multiple=4, row_multiple=128),
)
KEY_IDS = [str(key) for key in ALL_KEYS]

TABLE = define_custom(
    torch.randint(0, 65536, (65536,), generator=torch.Generator().manual_seed(1))
    .to(torch.int16)
    .view(BF16)
)
UNARY = ("identity", "relu", "relu2", "silu", "gelu_tanh", "gelu_erf", TABLE)
NORMS = [
    NormSemantics(order, 1e-5, bias, residual)
    for order, bias, residual in itertools.product(oracle.NORM_ORDERS, (False, True), (False, True))
    if order.startswith("layer_norm") or not bias
]
NORM_IDS = [f"{n}{'+bias' if n.bias else ''}" for n in NORMS]
WIDTHS = (1, 16, 64, 128, 192, 576, 1368, 3420, 5120, 10240)
SPECIAL = (0.0, -0.0, 1e-43, -6e-8, 448.0, 449.0, 464.0, 465.0, 480.0, torch.inf, -torch.inf)


def each_isa() -> Iterator[str]:
    for number, isa in enumerate(ISAS):
        assert library.load().functions.bl_set_isa(number) == 0
        yield isa


def random(*shape: int, seed: int = 0, size: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * size).to(BF16)


def shuffled(x: torch.Tensor, seed: int) -> torch.Tensor:
    return x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as rows of a wider, otherwise NaN, tensor."""
    room = x.new_full((x.shape[0], x.shape[1] + 9), torch.nan)
    room[:, 4:-5] = x
    return room[:, 4:-5]


def contract(key: QuantKey | None, scale: float = SCALE) -> InputContract:
    if key is None:
        return InputContract(None)
    given = InputScale.checked(scale, "test") if key.static else None
    above = InputScale.checked(GLOBAL_SCALE, "test") if key.global_scale else None
    return InputContract(key, given, above)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def raw_bits(x: torch.Tensor) -> torch.Tensor:
    """All NaN alike: their payloads are nobody's business."""
    return bits(torch.where(x.isnan(), torch.nan, x))


def steps(x: torch.Tensor) -> list[int]:
    """The strides that matter."""
    if x.numel() == 0:
        return []
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


class Expected:
    """What the oracle makes of a raw activation, under one key."""

    def __init__(self, raw: torch.Tensor, given: InputContract) -> None:
        assert given.key is not None
        self.codes = oracle.quantize(
            raw,
            given.key,
            static_scale=given.scale and given.scale.value,
            global_scale=given.global_scale and given.global_scale.value,
        )

    def check(self, found: Outputs, what: str) -> None:
        assert found.codes is not None
        assert found.scale is not None
        assert torch.equal(bits(found.codes), bits(self.codes.codes)), f"{what}: codes"
        assert steps(found.scale) == steps(self.codes.scale), f"{what}: layout"
        assert torch.equal(bits(found.scale), bits(self.codes.scale)), f"{what}: scales"


def check_activation(
    semantics: ActivationSemantics,
    inputs: tuple[torch.Tensor, ...],
    keys: tuple[QuantKey, ...],
    scale: float = SCALE,
) -> None:
    raw = oracle.activate(semantics, *inputs)
    for key in keys:
        given = contract(key, scale)
        expected = Expected(raw, given)
        for isa in each_isa():
            found = new_outputs(inputs[0], given, "test")
            native.activation(semantics, inputs, found)
            expected.check(found, f"{semantics} {key} {isa}")


def norm_inputs(
    semantics: NormSemantics, x: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    columns = x.shape[-1]
    inputs = [x]
    if semantics.residual:
        inputs.append(random(*x.shape, seed=7) if residual is None else residual)
    inputs.append(random(1, columns, seed=8, size=1.0)[0])
    if semantics.bias:
        inputs.append(random(1, columns, seed=9, size=1.0)[0])
    return tuple(inputs)


def check_norm(
    semantics: NormSemantics, inputs: tuple[torch.Tensor, ...], keys: tuple[QuantKey, ...]
) -> None:
    wanted = oracle.norm(semantics, inputs)
    for key in keys:
        given = contract(key)
        expected = Expected(wanted.out, given)
        for isa in each_isa():
            found = new_outputs(inputs[0], given, "test")
            residual = native.norm(semantics, inputs, found)
            expected.check(found, f"{semantics} {key} {isa}")
            assert (residual is None) == (wanted.residual is None)
            if residual is not None:
                assert torch.equal(raw_bits(residual), raw_bits(wanted.residual))


SOURCES: list[ActivationSemantics | NormSemantics] = [
    IDENTITY,
    ActivationSemantics("relu2", gated=False),
    ActivationSemantics("silu", gated=True),
    ActivationSemantics("gelu_erf", gated=True, limit=2.0),
    NormSemantics("llama", 1e-6),
    NormSemantics("layer_norm", 1e-6, bias=True, residual=True),
]
SOURCE_IDS = [str(source) for source in SOURCES]


def inputs_of(source: ActivationSemantics | NormSemantics, x: torch.Tensor):
    if isinstance(source, NormSemantics):
        return norm_inputs(source, x)
    return (x, random(*x.shape, seed=5)) if source.gated else (x,)


def raw_of(source: ActivationSemantics | NormSemantics, inputs) -> torch.Tensor:
    if isinstance(source, NormSemantics):
        return oracle.norm(source, inputs).out
    return oracle.activate(source, *inputs)


def run(source: ActivationSemantics | NormSemantics, inputs, found: Outputs) -> None:
    if isinstance(source, NormSemantics):
        wanted = oracle.norm(source, inputs).residual
        residual = native.norm(source, inputs, found)
        if residual is not None:
            assert torch.equal(raw_bits(residual), raw_bits(wanted))
    else:
        native.activation(source, inputs, found)


def adapters(ranks, columns: int, slots, dtype=BF16, width: int | None = None, seed: int = 0):
    """A pool of each slot's A, some with room for more; what nobody uses is NaN."""
    used = set(slots)
    rooms = [rank + slot % 2 for slot, rank in enumerate(ranks)]
    starts = list(itertools.accumulate(rooms, initial=0))
    a = torch.full((starts[-1], columns), torch.nan, dtype=dtype)
    for slot, rank in enumerate(ranks):
        if slot in used:
            values = random(rank, columns, seed=seed + slot, size=0.05)
            a[starts[slot] : starts[slot] + rank] = values.to(dtype)
    return Shrink(
        f"linear{seed}",
        a,
        torch.tensor(starts[:-1], dtype=torch.int32),
        torch.tensor(ranks, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
        max((ranks[slot] for slot in used if slot >= 0), default=0),
        max(ranks) if width is None else width,
    )
