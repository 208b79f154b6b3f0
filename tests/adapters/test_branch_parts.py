"""All parts of a linear's branch, in slots, against their definition in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from branchline.adapters.branch import LayerBranch
from branchline.adapters.by_slot import dense_product
from branchline.adapters.slots import SlotClasses
from branchline.adapters.weights import LayerWeights, LowRank, RotationFactor
from branchline.core.errors import RawConsumerError
from branchline.core.quant_key import FP8_STATIC_TENSOR
from branchline.core.quantized_activation import QuantizedActivation
from branchline.linear.batch import BarePlan, Batch, BatchScope
from branchline.linear.branching import BranchInput, BranchRows
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.registry import LayerRegistry
from branchline.linear.routed import RoutedLinear
from tests.helpers import same_bytes

K, N, TOKENS = 24, 10, 3
SLOTS = SlotClasses((4, 4, 4, 4, 4, 4, 4))


def parts(seed: int) -> dict[str, object]:
    """One of each part."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    order = torch.randperm(K, generator=generator)
    return {
        "low_rank": LowRank(random(3, K), random(N, 3), 0.5),
        "gain": random(N),
        "shift": random(N),
        "in_scale": random(K),
        "rotation": (RotationFactor(random(6, 4, 4), order), RotationFactor(random(3, 8, 8))),
        "delta": random(N, K),
        "weight": random(N, K),
    }


COMBINATIONS = {
    "low_rank": ("low_rank",),
    "gain": ("gain",),
    "shift": ("shift",),
    "in_scale": ("in_scale",),
    "rotation": ("rotation",),
    "delta": ("delta",),
    "weight": ("weight",),
    "dora": ("low_rank", "gain", "shift"),
    "oft": ("rotation", "gain"),
    "head": ("weight", "shift"),
    "all": ("low_rank", "gain", "shift", "in_scale", "rotation", "delta", "weight"),
    "all_on_base": ("low_rank", "gain", "shift", "in_scale", "rotation", "delta"),
}


def layer_weights(combination: str, seed: int) -> LayerWeights:
    made = parts(seed)
    return LayerWeights(**{name: made[name] for name in COMBINATIONS[combination]})


def defined(x: torch.Tensor, module: nn.Linear, weights: LayerWeights) -> torch.Tensor:
    """The formula of `adapters/weights.py`, in float64."""
    x = x.double()
    fed = x if weights.in_scale is None else x * weights.in_scale.double()
    for factor in weights.rotation:
        ordered = fed if factor.order is None else fed[..., factor.order]
        matrix = torch.block_diag(*factor.blocks.double())
        fed = ordered @ matrix
    if weights.weight is None:
        out = fed @ module.weight.double().T + module.bias.double()
    else:
        out = fed @ weights.weight.double().T
    if weights.gain is not None:
        out = out * weights.gain.double()
    product = weights.low_rank
    if product is not None:
        out = out + product.scaling * (x @ product.a.double().T) @ product.b.double().T
    if weights.delta is not None:
        out = out + x @ weights.delta.double().T
    return out if weights.shift is None else out + weights.shift.double()


class Linear:
    """A routed linear with adapters in its slots."""

    def __init__(self, adapters: Sequence[LayerWeights | None], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(K, N).to(dtype)
        self.registry = LayerRegistry()
        cpu = torch.device("cpu")
        kernel = FloatLinear(self.module)
        self.layer = RoutedLinear("proj", 0, kernel, self.registry, dtype, cpu, self.module)
        self.registry.add(self.layer)
        self.adapters = adapters
        self.branch = self.layer.branch = LayerBranch("proj", SLOTS, K, N, torch.float32, cpu)
        for slot, weights in enumerate(adapters):
            if weights is not None:
                self.branch.write(slot, weights)

    def batch(self, chosen: Sequence[int]) -> Batch:
        bits = 0
        for slot in chosen:
            bits |= self.adapters[slot].parts if slot >= 0 else 0
        slots = torch.tensor([chosen], dtype=torch.int32)
        return Batch(BarePlan((), (bool(bits),), (bits,)), len(chosen), slots)

    def add(self, base: torch.Tensor, x: object, chosen: Sequence[int]) -> torch.Tensor:
        rows = BranchRows.at(self.layer, self.batch(chosen))
        return self.branch.add(base, BranchInput(x, "proj"), rows)

    def run(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        with BatchScope(self.registry.owner, self.batch(chosen)):
            return self.layer(x)


def inputs(rows: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, TOKENS, K, generator=torch.Generator().manual_seed(7)).to(dtype)
    return x.index_fill_(2, torch.tensor([5]), -0.0)


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
def test_every_part_is_what_its_definition_says(combination, dtype, tolerance):
    weights = layer_weights(combination, 1)
    linear = Linear([None, weights], dtype)
    x = inputs(2, dtype)
    got = linear.run(x, [1, -1])
    assert got.dtype == dtype
    wanted = defined(x[0], linear.module, weights)
    assert (got[0].double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert same_bytes(got[1], linear.run(x, [-1, -1])[1])


ALL = [layer_weights(name, seed) for seed, name in enumerate(COMBINATIONS)]


@pytest.mark.parametrize("chosen", [[0], [5, -1], [0, 1, 2, 3, 4, 5, 6], [6, -1, 6, 4, -1, 0, 2]])
@pytest.mark.parametrize("group", [0, 5])
def test_a_row_does_not_depend_on_its_neighbours(chosen, group):
    linear = Linear(ALL[group : group + 7], torch.float32)
    x = inputs(len(chosen), torch.float32)
    together = linear.run(x, chosen)
    base = linear.run(x, [-1] * len(chosen))
    for row, slot in enumerate(chosen):
        if slot < 0:
            assert same_bytes(together[row], base[row])
            continue
        wanted = defined(x[row], linear.module, linear.adapters[slot])
        assert (together[row].double() - wanted).abs().max() <= 2e-6 * wanted.abs().max()
        # In a batch of the same shape, with nobody else.
        lone = [slot if other == row else -1 for other in range(len(chosen))]
        assert same_bytes(together[row], linear.run(x, lone)[row])
        if not linear.adapters[slot].changes_input:
            # Its own rows alone; the library's own product is left out of the comparison.
            assert same_bytes(together[row], linear.add(base[row], x[row], [slot]))


def test_a_slot_that_is_cleared_or_written_again_keeps_nothing():
    everything, shift = layer_weights("all", 3), layer_weights("shift", 4)
    linear = Linear([everything, everything], torch.float32)
    x = inputs(2, torch.float32)
    base = linear.run(x, [-1, -1])
    # As in a batch whose other row still has every part: what is left of a part would show.
    linear.branch.clear(0)
    assert same_bytes(linear.run(x, [0, 1])[0], base[0] + 0.0)
    linear.branch.write(0, shift)
    assert torch.equal(linear.run(x, [0, 1])[0], base[0] + shift.shift)


def test_a_zero_keeps_its_sign_beside_other_parts():
    gain = LayerWeights(gain=-torch.ones(N))
    linear = Linear([gain, layer_weights("dora", 2), layer_weights("shift", 3)], torch.float32)
    with torch.no_grad():
        linear.module.weight.zero_()
        linear.module.bias.zero_()
    x = inputs(3, torch.float32)
    alone = linear.run(x, [0, -1, -1])
    together = linear.run(x, [0, 1, 2])
    assert torch.signbit(alone[0]).any()
    assert same_bytes(alone[0], together[0])


def test_addresses_stay():
    linear = Linear([layer_weights("all", 1)], torch.float32)
    branch = linear.branch

    def addresses() -> list[int]:
        stacks = [*branch._vectors.values(), branch.low_rank.a, branch.low_rank.b]
        return [stack.data_ptr() for stack in stacks]

    before = addresses()
    for seed in range(5):
        branch.write(seed, layer_weights("all", seed))
    assert addresses() == before


def test_output_parts_alone_never_ask_for_the_raw_activation():
    output_only = [layer_weights(name, 1) for name in ("gain", "shift")]
    linear = Linear([*output_only, layer_weights("low_rank", 2)], torch.float32)
    codes = torch.full((2, TOKENS, K), float("nan")).to(torch.float8_e4m3fn)
    x = QuantizedActivation(
        codes, torch.ones(1), torch.float32, codes.shape, FP8_STATIC_TENSOR, None, "test"
    )
    base = torch.ones(2 * TOKENS, N)
    out = linear.add(base, x, [0, 1]).view(2, TOKENS, N)
    assert torch.equal(out[0], linear.adapters[0].gain.expand(TOKENS, N))
    assert torch.equal(out[1], 1 + linear.adapters[1].shift.expand(TOKENS, N))
    with pytest.raises(RawConsumerError, match="proj"):
        linear.add(base, x, [0, 2])


def test_codes_cannot_be_changed():
    linear = Linear([layer_weights("in_scale", 1)], torch.float32)
    codes = torch.zeros(1, TOKENS, K).to(torch.float8_e4m3fn)
    x = QuantizedActivation(
        codes, torch.ones(1), torch.float32, codes.shape, FP8_STATIC_TENSOR, None, "test"
    )
    rows = BranchRows.at(linear.layer, linear.batch([0]))
    with pytest.raises(RawConsumerError, match="proj"):
        linear.branch.change_input(BranchInput(x, "proj"), rows)


def test_a_dense_product_in_pieces_is_the_whole(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, K, generator=generator)
    weight = torch.randn(N, K, generator=generator).bfloat16()
    monkeypatch.setattr("branchline.adapters.by_slot._WIDENED", 3 * K)
    got = dense_product(x, weight)
    torch.testing.assert_close(got, x @ weight.float().T, rtol=1e-5, atol=1e-5)


def test_bytes_of_all_parts_are_counted():
    branch = Linear([layer_weights("all", 1)], torch.float32).branch
    vectors = len(SLOTS) * (N + N + K) * 4
    dense = (2 * N * K + 6 * 16 + 3 * 64) * 4
    assert branch.nbytes == branch.low_rank.nbytes + vectors + dense
