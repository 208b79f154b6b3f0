from __future__ import annotations

import pytest
import torch

from branchline.core import FP8_STATIC_TENSOR
from branchline.core.errors import ContractError, ScaleError
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.outputs import RawRequest, Shrink, new_outputs

CONTRACT = InputContract(FP8_STATIC_TENSOR, InputScale.checked(0.5, "x"))


def shrink(requests: int, columns: int = 8) -> Shrink:
    slots = torch.zeros(requests, dtype=torch.int32)
    return Shrink.stacked("q_proj", torch.zeros(1, 4, columns), torch.tensor([4]).int(), slots, 4)


def raw(requests: int) -> RawRequest:
    return RawRequest(torch.ones(requests, dtype=torch.bool))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"raw": raw(4)}, "6 rows do not belong to 4 requests in turn"),
        ({"raw": raw(0)}, "6 rows do not belong to 0 requests"),
        ({"shrinks": (shrink(5),)}, "6 rows do not belong to 5 requests"),
        ({"shrinks": (shrink(2), shrink(3))}, "belong to 2 or 3 requests"),
        ({"shrinks": (shrink(2),), "raw": raw(3)}, "belong to 2 or 3 requests"),
        ({"shrinks": (shrink(3, 9),)}, "q_proj shrinks 9 columns, the activation has 8"),
    ],
)
def test_what_kernels_would_read_beyond_is_refused(more, reason):
    with pytest.raises(ContractError, match=reason):
        new_outputs(torch.zeros(2, 3, 8), CONTRACT, "down_proj", **more)


def test_no_rows_belong_to_any_number_of_requests():
    for requests in (0, 3):
        made = new_outputs(torch.zeros(0, 8), CONTRACT, "x", raw=raw(requests))
        assert made.raw.values.shape == (0, 8)


def test_a_missing_scale_is_named():
    with pytest.raises(ScaleError, match="down_proj"):
        new_outputs(torch.zeros(2, 8), InputContract(FP8_STATIC_TENSOR), "down_proj")
