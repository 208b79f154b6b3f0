"""Raw rows and products with A beside the codes, on every instruction set of this processor."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from branchline.core import native as library
from branchline.core import oracle
from branchline.core.oracle import ActivationSemantics
from branchline.core.quant_key import (
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    ScaleFormat,
    ScaleLayout,
)
from branchline.linear import native
from branchline.linear.outputs import RawRequest, Shrink, new_outputs
from tests.linear.native.cases import (
    ALL_KEYS,
    BF16,
    IDENTITY,
    NORMS,
    SOURCE_IDS,
    SOURCES,
    Expected,
    adapters,
    bits,
    check_activation,
    check_norm,
    contract,
    each_isa,
    inputs_of,
    norm_inputs,
    random,
    raw_bits,
    raw_of,
    run,
    strided,
)


@pytest.mark.parametrize("source", SOURCES, ids=SOURCE_IDS)
@pytest.mark.parametrize("key", [None, *KEYS], ids=str)
def test_raw_rows(source, key):
    """All rows, some in place, some compact, none; the others are not touched."""
    x = random(24, 330)
    x[3, 7], x[20, 0] = torch.nan, -torch.inf
    inputs = inputs_of(source, x)
    raw = raw_of(source, inputs)
    given = contract(key)
    expected = None if key is None else Expected(raw, given)
    wanted = torch.tensor([False, True, True, False, False, True, False, False])
    for isa, mask in itertools.product(each_isa(), (None, wanted, wanted & False)):
        taken = torch.ones(24, dtype=torch.bool) if mask is None else mask.repeat_interleave(3)
        for compact in (False, True) if mask is not None else (False,):
            found = new_outputs(x, given, "test", raw=RawRequest(mask, compact))
            run(source, inputs, found)
            what = f"{source} {key} {isa} {compact}"
            if expected is not None:
                expected.check(found, what)
            values = found.raw.values
            ours = values if compact else values[taken]
            assert torch.equal(raw_bits(ours), raw_bits(raw[taken])), what
            if not compact:
                assert (bits(values[~taken]) == -1).all(), what


# --- products with A ----------------------------------------------------------------------------


def exact_product(rows: torch.Tensor, request: Shrink) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, and a bound for what float32 sums may miss it by."""
    out = torch.zeros(rows.shape[0], request.width, dtype=torch.float64)
    bound = torch.zeros_like(out)
    each = rows.shape[0] // request.slots.shape[0]
    for number, slot in enumerate(request.slots.tolist()):
        if slot >= 0:
            rank, part = int(request.ranks[slot]), slice(number * each, number * each + each)
            a = request.a[int(request.starts[slot]) :][:rank].double().mT
            out[part, :rank] = rows[part].double() @ a
            bound[part, :rank] = rows[part].double().abs() @ a.abs()
    return out, bound * 2e-5 + 1e-30


def check_product(rows: torch.Tensor, request: Shrink) -> None:
    wanted, bound = exact_product(rows, request)
    for isa in each_isa():
        found = native.shrink(rows, request)
        assert found.shape == wanted.shape
        assert ((found.double() - wanted).abs() <= bound).all(), isa


RANKS = (1, 2, 4, 5, 8, 14, 16, 32, 64)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("columns", [1, 33, 576, 1024, 3420, 5120])
def test_shrink(columns, dtype):
    """Every rank beside the others; two slots unused, two requests without any."""
    slots = [8, -1, *range(9), 3, 3, -1, 8]
    request = adapters((*RANKS, 3, 70), columns, slots, dtype)
    check_product(random(3 * len(slots), columns), request)
    check_product(strided(random(len(slots), columns)), request)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 31])
def test_shrink_shapes(rows, rank):
    check_product(random(rows, 1500), adapters([rank], 1500, [0]))
    check_product(random(rows, 96), adapters([rank, 2], 96, [0], width=rank + 3))


def test_shrink_of_nothing():
    assert native.shrink(random(0, 64), adapters([4], 64, [])).shape == (0, 4)
    for _ in each_isa():
        assert (native.shrink(random(3, 64), adapters([4], 64, [-1] * 3)) == 0).all()
        empty = torch.empty((3, 0), dtype=BF16)
        assert (native.shrink(empty, adapters([4], 0, [0] * 3)) == 0).all()


@pytest.mark.parametrize("source", SOURCES, ids=SOURCE_IDS)
@pytest.mark.parametrize("key", [None, *KEYS], ids=str)
def test_absorbed_equals_separate(source, key):
    """Three linears of one site, of which each has its own slots; raw rows at the same time."""
    x = random(24, 1100)
    inputs = inputs_of(source, x)
    raw = raw_of(source, inputs)
    given = contract(key)
    expected = None if key is None else Expected(raw, given)
    requests = (
        adapters([4, 9, 16], 1100, [0, 1, -1, 2, 1, 1, 0, -1], seed=10),
        adapters([4, 9, 1], 1100, [0, 1, -1, 2, 1, -1, 0, -1], torch.float32, width=12, seed=20),
        adapters([3], 1100, [-1] * 8, seed=30),
    )
    wanted = torch.tensor([True, False, False, True, False, False, False, True])
    for isa, asked in itertools.product(each_isa(), (None, RawRequest(wanted, compact=True))):
        found = new_outputs(x, given, "test", raw=asked, shrinks=requests)
        run(source, inputs, found)
        if expected is not None:
            expected.check(found, f"{source} {key} {isa}")
        for request, product in zip(requests, found.shrunk, strict=True):
            assert torch.equal(bits(product), bits(native.shrink(raw, request))), isa
        if asked is not None:
            taken = wanted.repeat_interleave(3)
            assert torch.equal(raw_bits(found.raw.values), raw_bits(raw[taken]))


def test_special_values_in_a_product():
    """They stay in their own row, and in their own column."""
    rows = random(9, 700)
    request = adapters([16], 700, [0])
    rows[2, 3], rows[5, 699] = torch.nan, torch.inf
    request.a[7, 650] = torch.nan
    for _ in each_isa():
        odd = ~native.shrink(rows, request).isfinite()
        assert odd[2].all()
        assert odd[5].all()
        assert odd[:, 7].all()
        assert int(odd.sum()) == 2 * 16 + 7


@pytest.mark.parametrize("columns", [40, 1100, 5120])
def test_neighbours_do_not_show(columns):
    """A row's product is the same alone, in any batch, in any order and on any thread count."""
    generator = torch.Generator().manual_seed(columns)
    slots = torch.randint(-1, 4, (37,), generator=generator).tolist()
    rows, request = random(37, columns), adapters([16, 5, 64, 1], columns, [*slots, 0, 1, 2, 3])
    request = replace(request, slots=request.slots[:37])
    order = torch.randperm(37, generator=generator)
    for _ in each_isa():
        whole = native.shrink(rows, request)
        moved = native.shrink(rows[order], replace(request, slots=request.slots[order]))
        assert torch.equal(moved, whole[order])
        for count in (1, 2, 3, 6, 20):
            part = native.shrink(rows[-count:], replace(request, slots=request.slots[-count:]))
            assert torch.equal(part, whole[-count:])
        one_slot = native.shrink(rows, replace(request, slots=request.slots[3:4]))
        assert torch.equal(one_slot[3], whole[3])


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_threads_do_not_show(monkeypatch, threads):
    monkeypatch.setattr(library, "threads", lambda: threads)
    x, up = random(3, 70001), random(3, 70001, seed=1)
    keys = (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN, MXFP8)
    check_activation(IDENTITY, (x,), keys)
    check_activation(ActivationSemantics("silu", gated=True), (strided(x), up), keys)
    check_norm(NORMS[0], norm_inputs(NORMS[0], x), keys)
    rows, request = random(40, 3000), adapters([8, 3], 3000, [0, 1, -1, 0, 1] * 4)
    for _ in each_isa():
        found = native.shrink(rows, request)
        with monkeypatch.context() as other:
            other.setattr(library, "threads", lambda: 3)
            assert torch.equal(found, native.shrink(rows, request))


def test_gaps_between_rows_are_not_touched():
    """Codes and products of rows that lie apart: only what belongs to a row is written."""
    x = random(6, 70)
    for _ in each_isa():
        room = torch.full((6, 80), 0x7F, dtype=torch.uint8)
        found = replace(
            new_outputs(x, contract(FP8_STATIC_TENSOR), "test"),
            codes=room.view(torch.float8_e4m3fn),
        )
        native.activation(IDENTITY, (x,), found)
        assert (room[:, 70:] == 0x7F).all()
        assert torch.equal(room[:, :70], bits(oracle.quantize_static(x, found.scale)))


def test_scale_formats_are_all_here():
    assert {key.scale_format for key in ALL_KEYS} == set(ScaleFormat)
    assert {key.layout for key in ALL_KEYS} == set(ScaleLayout)
