"""What producers are compared on: inputs by family, and the layouts of keys.

Every case is made from fixed seeds, on the CPU first, so that it is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...core.oracle import (
    ACTIVATIONS,
    NORM_ORDERS,
    ActivationSemantics,
    NormSemantics,
    Semantics,
)
from ...core.oracle.activation import define_custom
from ...core.quant_key import QuantKey, ScaleLayout
from ...linear.contract import InputContract, InputScale
from ...linear.outputs import Shrink

DTYPE = torch.bfloat16

#: (rows, columns): every width and every number of rows, not every pair of them.
SHAPES = (
    (0, 64), (0, 1368), (1, 1), (129, 1), (17, 192), (300, 16), (17, 64), (300, 64), (1, 128),
    (129, 128), (3, 16), (129, 192), (1, 576), (17, 576), (3, 1368), (17, 1368), (1, 3420),
    (17, 3420), (3, 5120), (1, 10240), (3, 10240),
)  # fmt: skip
#: Those on which layouts are compared as well.
_ARRANGED = {(0, 1368), (17, 192), (129, 192), (17, 1368)}
QUICK_SHAPES = ((0, 64), (1, 1), (17, 192), (3, 1368))

#: Zeros, infinities, NaN, the ends of the subnormals, the largest, and values about e4m3's 448.
SPECIAL = (
    math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0**-133, -(2.0**-133), 127 * 2.0**-133, 2.0**-126,
    1e-43, -6e-8, 3.3895313892515355e38, -3.3895313892515355e38, 1.0, -1.0, 448.0, -449.0, 464.0,
    465.0, -480.0, 88.5, -88.5, 2.0**-10, 1.5 * 2.0**-9,
)  # fmt: skip
#: Rows whose largest magnitude is one of these have a tiny scale, or none that is finite.
AMAXES = (1e-43, 2.0**-133, 6e-8, 0.0, math.nan, math.inf, 448.0, 480.0)

_STATIC_SCALES = (0.0371, 1.0, 449.3, 2.0**-40)
_GLOBAL_SCALES = (0.0123, 1.0)
#: Columns between the rows of a strided input; odd, so that its rows are not aligned.
_GAP = 3


@dataclass(frozen=True, eq=False)
class Case:
    """One input for the producers of a family, and what else their calls need.

    Attributes:
        name: for reports.
        semantics: what to compute.
        inputs: as for `Producer.produce`, bfloat16.
        static_scale: for static keys.
        global_scale: for keys that have one.
        wanted: bool (R,), which requests ask for raw rows.
        shrinks: for two consumers, with slots of several ranks, and requests without one.
        arranged: layouts of the key are compared too, not only the plain one.
        large: all encodings.
    """

    name: str
    semantics: Semantics
    inputs: tuple[torch.Tensor, ...]
    static_scale: float
    global_scale: float
    wanted: torch.Tensor
    shrinks: tuple[Shrink, ...]
    arranged: bool
    large: bool

    def contract(self, key: QuantKey) -> InputContract:
        """What a consumer of `key` tells the producer of this case."""
        device = self.inputs[0].device
        static = torch.tensor([self.static_scale], device=device) if key.static else None
        given = torch.tensor([self.global_scale], device=device) if key.global_scale else None
        return InputContract(
            key,
            None if static is None else InputScale.checked(static, self.name),
            None if given is None else InputScale.checked(given, self.name),
        )


def arrangements(key: QuantKey) -> tuple[QuantKey, ...]:
    """Layouts and paddings of a plain key that consumers ask for."""
    if key.granularity.kind != "group":
        return (replace(key, row_multiple=16),)
    column_major, swizzle = ScaleLayout.COLUMN_MAJOR, ScaleLayout.SWIZZLE_128X4
    return (
        replace(key, row_multiple=8, scale_multiple=4),
        replace(key, scale_multiple=4),
        replace(key, layout=column_major),
        replace(key, layout=column_major, row_multiple=4),
        replace(key, layout=swizzle),
        replace(key, layout=swizzle, row_multiple=128),
    )


def cases(family: str, device: torch.device, *, quick: bool = False) -> Iterator[Case]:
    """Every case of a family, on `device`; none for a family that is not known here.

    Args:
        family: as producers are registered for it.
        device: where the inputs lie.
        quick: a few shapes, one variant of each semantics.
    """
    norms = {NormSemantics(order, 0.0).family: order for order in NORM_ORDERS}
    if family in norms:
        inputs = _norm_inputs(norms[family], quick)
    else:
        name, gated = family.removesuffix("_mul"), family.endswith("_mul")
        if name == "custom":
            name = _custom()
        elif name not in ACTIVATIONS:
            return
        inputs = _activation_inputs(name, gated, quick)
    for index, made in enumerate(inputs):
        yield _case(index, made, device)


# --- values ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def encodings() -> torch.Tensor:
    """All 65,536 bfloat16, (256, 256): a row's have their first byte in common, so one binade or
    two, and dynamic scales do not send all of it to zero."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPE).view(256, 256)


@lru_cache(maxsize=1)
def shuffled() -> torch.Tensor:
    """All encodings in a fixed order, (256, 256): partners for `encodings`."""
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(0))
    return encodings().flatten()[order].view(256, 256)


def spread(rows: int, columns: int, seed: int) -> torch.Tensor:
    """(rows, columns) over many binades, with special values here and there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, columns), generator=generator)
    x *= 2.0 ** torch.randint(-10, 7, (rows, 1), generator=generator)
    flat = x.view(-1)
    # Few enough that most rows, and most groups, are ruled by their ordinary values.
    places = torch.randperm(flat.numel(), generator=generator)[: min(24, flat.numel() // 40)]
    flat[places] = torch.tensor(SPECIAL)[torch.arange(len(places)) % len(SPECIAL)]
    return x.to(DTYPE)


def amax_rows(columns: int) -> torch.Tensor:
    """(len(AMAXES), columns): rows with a largest magnitude that makes a scale extreme."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.rand((len(AMAXES), columns), generator=generator) - 0.5
    top = torch.tensor(AMAXES)
    x *= torch.where(top.isfinite(), top, 1.0)[:, None]
    x[:, columns // 2] = top
    return x.to(DTYPE)


def special_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every special value with every other: two of (n, n)."""
    special = torch.tensor(SPECIAL).to(DTYPE)
    number = len(special)
    return special[:, None].repeat(1, number), special[None].repeat(number, 1)


@lru_cache(maxsize=1)
def _custom() -> str:
    return define_custom(F.softplus(encodings().flatten().float()).to(DTYPE))


# --- inputs by family --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Inputs:
    name: str
    semantics: Semantics
    tensors: tuple[torch.Tensor, ...]
    arranged: bool = False
    large: bool = False


class _Shaped(NamedTuple):
    """Inputs of one shape: `make(0)` is the first, `make(1)` its partner."""

    name: str
    make: Callable[[int], torch.Tensor]
    arranged: bool = False


def _activation_inputs(name: str, gated: bool, quick: bool) -> Iterator[_Inputs]:
    plain = ActivationSemantics(name, gated)
    inputs = 2 if gated else 1
    variants = _variants(plain)
    for semantics in variants[: 2 if quick else None]:
        yield _Inputs("special values", semantics, special_pairs()[:inputs])
        if quick and semantics is not plain:
            continue
        places = ((encodings(), shuffled()), (shuffled(), encodings()))
        for place, pair in list(zip(("gate", "up"), places, strict=True))[:inputs]:
            yield _Inputs(f"all encodings as {place}", semantics, pair[:inputs], large=True)
    for shaped in _shapes(quick):
        tensors = tuple(shaped.make(partner) for partner in range(inputs))
        yield _Inputs(shaped.name, plain, tensors, shaped.arranged)


def _variants(plain: ActivationSemantics) -> tuple[ActivationSemantics, ...]:
    """With limits, multipliers and offsets, where the semantics take them."""
    offset = 1.0 if plain.gated else None
    if plain.custom:
        return (plain, replace(plain, limit=7.0, up_offset=offset)) if plain.gated else (plain,)
    return (
        plain,
        replace(plain, limit=7.0, multiplier=1.702, up_offset=offset),
        replace(plain, limit=7.0),
        replace(plain, multiplier=1.702),
    )


def _norm_inputs(order: str, quick: bool) -> Iterator[_Inputs]:
    centered = NormSemantics(order, 0.0).centered
    variants = [
        NormSemantics(order, eps, bias, residual)
        for eps, residual in ((1e-6, False), (1e-5, True))
        for bias in ((True, False) if centered else (False,))
    ]
    everything = _Shaped("all encodings", lambda partner: shuffled() if partner else encodings())
    for semantics in variants[: 1 if quick else None]:
        yield replace(_norm(semantics, everything), large=True)
    # Variants in turn: each sees small and large shapes.
    for index, shaped in enumerate(_shapes(quick)):
        yield _norm(variants[index % len(variants)], shaped)


def _norm(semantics: NormSemantics, shaped: _Shaped) -> _Inputs:
    rows = tuple(shaped.make(partner) for partner in range(2 if semantics.residual else 1))
    vectors = _vectors(rows[0].shape[-1], 2 if semantics.bias else 1)
    name = f"{shaped.name} with a bias" if semantics.bias else shaped.name
    return _Inputs(name, semantics, rows + vectors, shaped.arranged)


def _vectors(columns: int, number: int) -> tuple[torch.Tensor, ...]:
    """Weights and biases about their usual values, with zeros and negative ones."""
    generator = torch.Generator().manual_seed(columns)
    made = torch.randn((number, columns), generator=generator) * 0.3 + 1.0
    made[:, ::7] *= -1.0
    made[:, columns // 3] = 0.0
    return tuple(made.to(DTYPE).unbind())


def _shapes(quick: bool) -> Iterator[_Shaped]:
    """Every shape, extreme rows, rows with gaps between them, more than two dimensions."""
    for index, (rows, columns) in enumerate(QUICK_SHAPES if quick else SHAPES):
        make = partial(_spread, rows, columns, 2 * index)
        yield _Shaped(f"{rows} x {columns}", make, (rows, columns) in _ARRANGED)
    for columns in (48,) if quick else (48, 576, 3420):
        yield _Shaped(f"extreme rows of {columns}", partial(_extreme, columns))
    for rows, columns in ((5, 100),) if quick else ((5, 100), (33, 576)):
        yield _Shaped(f"{rows} x {columns} with gaps", partial(_strided, rows, columns))
    yield _Shaped(
        "2 x 3 x 4 x 96", lambda partner: spread(24, 96, partner).view(2, 3, 4, 96), not quick
    )


def _spread(rows: int, columns: int, seed: int, partner: int) -> torch.Tensor:
    return spread(rows, columns, seed + partner)


def _extreme(columns: int, partner: int) -> torch.Tensor:
    # Rolled, so that extreme rows meet others.
    return amax_rows(columns).roll(partner, 0)


def _strided(rows: int, columns: int, partner: int) -> torch.Tensor:
    return spread(rows, columns + _GAP, 50 + partner)[:, _GAP:]


# --- what goes with the inputs -----------------------------------------------------------------


def _case(index: int, made: _Inputs, device: torch.device) -> Case:
    first = made.tensors[0]
    requests = _requests(first.shape[:-1].numel())
    # Every third request, so that both kinds lie next to either kind.
    wanted = torch.arange(requests) % 3 != 1
    return Case(
        f"{made.semantics} {made.name}",
        made.semantics,
        tuple(_moved(x, device) for x in made.tensors),
        _STATIC_SCALES[index % len(_STATIC_SCALES)],
        _GLOBAL_SCALES[index % len(_GLOBAL_SCALES)],
        wanted.to(device),
        shrinks_for(first.shape[-1], requests, index, device),
        made.arranged,
        made.large,
    )


def _requests(rows: int) -> int:
    """How many requests the rows belong to: several where they can be divided."""
    return next((n for n in (8, 5, 4, 3, 17) if rows and rows % n == 0), 1)


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if x.is_contiguous():
        return x.to(device)
    whole = F.pad(x, (_GAP, 0)).to(device)
    return whole[..., _GAP:]


def shrinks_for(
    columns: int, requests: int, index: int, device: torch.device
) -> tuple[Shrink, ...]:
    """Two consumers' branches on `columns`: ranks below the width, and requests without a slot."""
    generator = torch.Generator().manual_seed(columns * 64 + index)
    dtype = (torch.bfloat16, torch.float32)[index % 2]
    widths: Sequence[int] = ((16, 8), (64, 16), (8, 32))[index % 3]
    made = []
    for number, width in enumerate(widths):
        a = torch.randn((3, width, columns), generator=generator)
        ranks = torch.tensor([width, max(1, width // 2), 3], dtype=torch.int32)
        for slot, rank in enumerate(ranks.tolist()):
            a[slot, rank:] = 0.0
        slots = (torch.arange(requests) + number) % 4 - 1
        live = ranks[slots[slots >= 0]]
        made.append(
            Shrink.stacked(
                f"consumer {number}",
                a.to(dtype).to(device),
                ranks.to(device),
                slots.to(torch.int32).to(device),
                int(live.max()) if len(live) else 0,
            )
        )
    return tuple(made)
