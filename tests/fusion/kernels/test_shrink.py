"""Shrunk rows of producers that absorb LoRA branches, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from branchline.core.oracle import ActivationSemantics, NormSemantics
from branchline.core.quant_key import (
    FP8_DYNAMIC_GROUP128,
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    KEYS,
    NVFP4,
)
from branchline.core.route import Route
from branchline.fusion.producers.eager import eager_raw
from branchline.linear.contract import InputContract
from branchline.linear.outputs import Outputs, RawRequest, Shrink, new_outputs

pytestmark = pytest.mark.triton_interpreted

SILU_MUL = ActivationSemantics("silu", gated=True)
IDENTITY = ActivationSemantics("identity", gated=False)
ADD_LLAMA = NormSemantics("llama", 1e-5, residual=True)
RANKS = (1, 2, 4, 5, 8, 14, 16, 32, 64)


@pytest.fixture(autouse=True)
def _small(plan):
    """Several chunks of several blocks from 512 columns on."""
    plan(CHUNK=256, SHRINK_BLOCK=128)


@pytest.fixture
def request_of():
    """`request_of(ranks, slots, columns)`: beyond its rank, and in slot 0, an A is garbage."""
    generator = torch.Generator().manual_seed(1)

    def make(ranks, slots, columns, *, dtype=torch.bfloat16, width=None, consumer="q") -> Shrink:
        ranks = torch.tensor([0, *ranks], dtype=torch.int32)
        width = width or int(ranks.max())
        a = torch.randn((len(ranks), width, columns), generator=generator).to(dtype)
        for slot, rank in enumerate(ranks):
            a[slot, rank:] = torch.nan
        slots = torch.tensor(slots, dtype=torch.int32)
        used = [int(ranks[slot]) for slot in slots if slot >= 0]
        return Shrink.stacked(consumer, a, ranks, slots, max(used, default=0))

    return make


def assert_shrunk(got: torch.Tensor, raw: torch.Tensor, request: Shrink) -> None:
    """Within what float32 rounds, zeros where there is no rank, and every element written."""
    rows = raw.reshape(raw.shape[:-1].numel(), raw.shape[-1]).double()
    assert got.dtype == torch.float32
    assert got.shape == (rows.shape[0], request.width)
    per_request = rows.shape[0] // max(request.slots.shape[0], 1)
    wanted, size = torch.zeros(2, *got.shape, dtype=torch.float64)
    for row, values in enumerate(rows):
        slot = int(request.slots[row // per_request])
        if slot >= 0:
            rank = int(request.ranks[slot])
            a = request.a[int(request.starts[slot]) :][:rank].double()
            wanted[row, :rank] = a @ values
            size[row, :rank] = a.abs() @ values.abs()
    assert ((got.double() - wanted).abs() <= size * 2.0**-20).all()


def run(check, emission, semantics, inputs, key, *requests, **more):
    """Codes and all equal the eager producer's; returns the shrunk rows of the first request."""
    asked = emission(key, shrinks=requests, route=Route.ABSORBED, **more)
    activation = check(semantics, inputs, asked).activation
    raw = eager_raw(semantics, inputs).out
    for request in requests:
        assert_shrunk(activation.shrunk[request.consumer], raw, request)
    return activation.shrunk[requests[0].consumer]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rank", RANKS)
def test_ranks(check, emission, random, request_of, rank, dtype):
    inputs = (random(3, 320), random(3, 320))
    request = request_of([rank], [1, -1, 1], 320, dtype=dtype)
    run(check, emission, SILU_MUL, inputs, FP8_STATIC_TENSOR, request)


def test_ranks_and_consumers_in_a_batch(check, emission, random, request_of):
    ranks, slots = (4, 14, 5, 32, 64), (3, -1, 1, 5, 2, 4)
    inputs = (random(6, 300), random(6, 300), random(300))
    requests = [
        request_of(ranks, slots, 300, consumer="q"),
        request_of(ranks[:2], [-1, 2, 1, -1, 0, 2], 300, consumer="k", width=40),
        request_of(ranks[:1], [-1] * 6, 300, consumer="v"),
    ]
    run(check, emission, ADD_LLAMA, inputs, FP8_STATIC_TENSOR, *requests)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_keys(check, emission, random, request_of, key):
    for tokens in (1, 3):
        rows = 2 * tokens
        request = request_of([5, 8], [2, -1], 600)
        run(check, emission, SILU_MUL, (random(rows, 600), random(rows, 600)), key, request)
    inputs = (random(2, 300), random(2, 300), random(300))
    run(check, emission, ADD_LLAMA, inputs, key, request_of([5, 8], [2, -1], 300))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (3, 1), (2, 17, 70), (2, 256)], ids=str)
def test_shapes(check, emission, random, request_of, shape):
    requests = request_of([3], [1] * shape[0], shape[-1])
    for key in (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN):
        run(check, emission, IDENTITY, (random(*shape),), key, requests)


@pytest.mark.parametrize("key", [FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN, NVFP4], ids=str)
def test_a_row_does_not_depend_on_the_row_count(
    check, emission, random, request_of, plan, key
):  # fmt: skip
    """One row or many of a request, one chunk a program or all of them."""
    x = random(18, 600)
    one = request_of([16], [1], 600)
    together = run(check, emission, IDENTITY, (x,), key, one)
    for rows in (slice(0, 1), slice(17, 18), slice(3, 6)):
        assert torch.equal(run(check, emission, IDENTITY, (x[rows],), key, one), together[rows])
    each = replace(one, slots=torch.ones(2, dtype=torch.int32))
    assert torch.equal(run(check, emission, IDENTITY, (x[:2],), key, each), together[:2])
    plan(ENOUGH_PROGRAMS=0)
    assert torch.equal(run(check, emission, IDENTITY, (x[:2],), key, each), together[:2])
    assert torch.equal(run(check, emission, IDENTITY, (x[:3],), key, one), together[:3])


def test_a_row_does_not_depend_on_its_neighbours(check, emission, random, request_of):
    """Their NaNs, their slots and their ranks included."""
    x = random(3, 300)
    request = request_of([4, 64], [1, 2, -1], 300)
    before = run(check, emission, IDENTITY, (x,), FP8_STATIC_TENSOR, request)[0].clone()
    x[1:] = torch.nan
    slots = torch.tensor([1, -1, 1], dtype=torch.int32)
    request = replace(request, slots=slots, rank=4)
    asked = emission(FP8_STATIC_TENSOR, shrinks=(request,), route=Route.ABSORBED)
    after = check(IDENTITY, (x,), asked).activation.shrunk["q"]
    assert torch.equal(before, after[0])
    assert (after[1] == 0).all(), "a row without a slot, whatever lies in it"
    assert after[2, :4].isnan().all()
    assert (after[2, 4:] == 0).all()


def test_padding_and_raw_beside(check, emission, random, request_of):
    key = replace(FP8_DYNAMIC_GROUP128, row_multiple=20)
    raw = RawRequest(torch.tensor([True, False]), compact=True)
    inputs = (random(6, 300), random(6, 300))
    run(check, emission, SILU_MUL, inputs, key, request_of([5], [-1, 1], 300), raw=raw)


def test_scales_padded_beyond_the_last_chunk(check, emission, random, request_of):
    key = replace(FP8_DYNAMIC_GROUP128, scale_multiple=8)
    inputs = (random(2, 300), random(2, 300))
    run(check, emission, SILU_MUL, inputs, key, request_of([5], [-1, 1], 300))


def test_no_key(random, request_of):
    """Raw and shrunk rows only."""
    from branchline.fusion.kernels.activation import launch_activation

    x, request = random(3, 300), request_of([5], [1, -1, 1], 300)
    outputs: Outputs = new_outputs(
        x, InputContract(None), "test", raw=RawRequest(), shrinks=(request,)
    )
    launch_activation(IDENTITY, (x,), outputs)
    assert torch.equal(outputs.raw.values, x)
    assert_shrunk(outputs.shrunk[0], x, request)
