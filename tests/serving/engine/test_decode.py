"""Attention of single tokens in the paged cache: the C kernel against gathered keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from branchline.core import native
from branchline.core.errors import ContractError
from branchline.serving.engine.decode import (
    GatheredDecodes,
    Kept,
    PagedDecodes,
    attends_in_place,
)

CPU = torch.device("cpu")
PLACES = 96
LENGTHS = (0, 5, 17, 40, 1)
needs_native = pytest.mark.skipif(
    not native.load().available, reason=f"no C kernels: {native.load().reason}"
)


class Inputs:
    """A cache with holes that hold NaN, and the new tokens of some sequences."""

    def __init__(
        self, heads: int, kv_heads: int, width: int, value_width: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(heads * width)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        order = torch.randperm(PLACES, generator=generator).tolist()
        # The first place stands in for whatever a gathered row is too short for.
        order.remove(0)
        self.kept, self.write, begin = [], [], 0
        for length in LENGTHS:
            places = np.array(order[begin : begin + length + 1], dtype=np.int64)
            self.kept.append(Kept(places, places.ctypes.data, length))
            self.write.append(int(places[length]))
            begin += length + 1
        self.keys, self.values = (
            normal(PLACES, kv_heads, width),
            normal(PLACES, kv_heads, value_width),
        )
        for cache in (self.keys, self.values):
            cache[torch.tensor(order[begin:])] = torch.nan
        rows = len(LENGTHS)
        # As the model's own views are: heads before tokens.
        self.query = normal(heads, rows, width).transpose(0, 1)
        self.key = normal(rows, kv_heads, width)
        self.value = normal(rows, kv_heads, value_width)

    def paged(
        self, rows: slice = slice(None), softcap: float | None = None, scaling: float | None = 0.3
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output of some rows, and keys and values afterwards."""
        keys, values = self.keys.clone(), self.values.clone()
        decodes = PagedDecodes(self.kept[rows], np.array(self.write[rows], dtype=np.int64))
        new = self.query[rows], self.key[rows], self.value[rows]
        return decodes.attend((keys, values), *new, scaling, softcap), keys, values

    def gathered(self, softcap: float | None, scaling: float | None) -> torch.Tensor:
        """The definition, in float32."""
        keys, values = self.keys.clone(), self.values.clone()
        keys[self.write], values[self.write] = self.key, self.value
        decodes = GatheredDecodes.of(self.kept, torch.float32, CPU, reads_first=False)
        query, key, value = (x.float() for x in (self.query, self.key, self.value))
        views = keys.float(), values.float()
        return decodes.attend(views, query, key, value, scaling, softcap)


@needs_native
@pytest.mark.parametrize(("softcap", "scaling"), [(None, None), (2.0, 0.3)])
@pytest.mark.parametrize(
    "shape", [(4, 4, 64, 64), (8, 2, 16, 16), (6, 1, 20, 12), (5, 1, 8, 8), (2, 2, 3, 3)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_attention_over_what_is_kept(dtype, shape, softcap, scaling):
    inputs = Inputs(*shape, dtype)
    out, keys, values = inputs.paged(softcap=softcap, scaling=scaling)
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(
        out.float(), inputs.gathered(softcap, scaling), rtol=tolerance, atol=tolerance
    )
    for cache, before, new in (
        (keys, inputs.keys, inputs.key),
        (values, inputs.values, inputs.value),
    ):
        expected = before.clone()
        expected[inputs.write] = new
        assert torch.equal(cache.nan_to_num(), expected.nan_to_num())


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bytes_alone_and_beside_others(dtype):
    inputs = Inputs(8, 2, 24, 24, dtype)
    together, _, _ = inputs.paged()
    for row in range(len(LENGTHS)):
        alone, _, _ = inputs.paged(slice(row, row + 1))
        assert torch.equal(alone[0], together[row])


@needs_native
def test_threads_change_no_byte():
    inputs, before = Inputs(32, 8, 128, 128, torch.bfloat16), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, _, _ = inputs.paged()
        torch.set_num_threads(4)
        four, _, _ = inputs.paged()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, four)


@needs_native
def test_a_full_ring_is_read_before_its_oldest_key_is_overwritten():
    inputs = Inputs(4, 4, 16, 16, torch.float32)
    apart, _, _ = inputs.paged(slice(3, 4))
    inputs.write[3] = int(inputs.kept[3].places[0])
    ring, keys, _ = inputs.paged(slice(3, 4))
    assert torch.equal(apart, ring)
    assert torch.equal(keys[inputs.write[3]], inputs.key[3])


@needs_native
def test_scores_far_below_and_above_all_others():
    """The likeliest key takes all; what is not a number stays so."""
    inputs = Inputs(1, 1, 16, 16, torch.float32)
    inputs.query[2] *= 1e4
    out, _, _ = inputs.paged()
    torch.testing.assert_close(out, inputs.gathered(None, 0.3), rtol=1e-4, atol=1e-5)
    inputs.keys[int(inputs.kept[2].places[4])] = torch.nan
    out, _, _ = inputs.paged()
    assert out[2].isnan().all()
    assert not out[[0, 1, 3, 4]].isnan().any()


@needs_native
def test_keys_of_another_dtype_than_the_cache_are_refused():
    inputs = Inputs(4, 4, 16, 16, torch.bfloat16)
    inputs.key = inputs.key.float()
    with pytest.raises(ContractError, match=r"keeps torch\.float32"):
        inputs.paged()


def test_a_device_without_the_kernels_gathers():
    assert not attends_in_place(torch.bfloat16, torch.device("cuda"))
    assert not attends_in_place(torch.float64, CPU)
    assert attends_in_place(torch.bfloat16, CPU) == native.load().available
