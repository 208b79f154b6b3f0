"""Which tokens an activated LoRA acts on."""

from __future__ import annotations

import pytest
import torch

from branchline.adapters.invocation import Invocations, last_start
from branchline.core.errors import BatchError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sequence", "wanted", "start"),
    [
        ([1, 2, 3, 2, 3], (2, 3), 3),
        ([2, 3, 1], (2, 3), 0),
        ([2, 2, 2], (2, 2), 1),
        ([1, 2], (2, 3), None),
        ([2], (2, 3), None),
        ([], (2,), None),
    ],
)
def test_the_last_occurrence_counts(sequence, wanted, start):
    assert last_start(sequence, wanted) == start


def masks(rows: Invocations, ids, past: int = 0):
    tensor = torch.tensor(ids)
    rows.see(tensor, past=past)
    return rows.mask(tensor.shape[1], CPU).view(tensor.shape).tolist()


def test_rows_act_from_their_own_invocation_on_and_others_always():
    rows = Invocations([(7, 8), None, (9,)])
    found = masks(rows, [[1, 7, 8, 2], [1, 2, 3, 4], [1, 2, 3, 4]])
    assert found == [[False, True, True, True], [True] * 4, [False] * 4]


def test_what_follows_an_invocation_stays_active_until_a_new_prompt():
    rows = Invocations([(7,), (7,)])
    masks(rows, [[7, 1], [1, 1]])
    assert masks(rows, [[5], [5]], 2) == [[True], [False]]
    # A later chunk may bring the tokens.
    assert masks(rows, [[5, 5], [7, 5]], 3) == [[True, True], [True, True]]
    assert masks(rows, [[5], [5]]) == [[False], [False]]


def test_a_call_that_is_cut_in_two_acts_from_its_second_part_on():
    rows = Invocations([(7, 8, 9)])
    assert masks(rows, [[1, 7]]) == [[False, False]]
    assert masks(rows, [[8]], 2) == [[False]]
    assert masks(rows, [[9, 1]], 3) == [[True, True]]
    masks(rows, [[1, 7, 8]])
    assert masks(rows, [[9, 1]]) == [[False, False]]


def test_tokens_that_are_taken_back_call_nothing():
    rows = Invocations([(7, 8)])
    assert masks(rows, [[1, 2, 7]]) == [[False] * 3]
    assert masks(rows, [[8, 3]], 3) == [[True, True]]
    assert masks(rows, [[4]], 5) == [[True]]
    # The 8 was only a guess, and another token takes its place.
    assert masks(rows, [[5]], 3) == [[False]]
    assert masks(rows, [[7, 8]], 4) == [[True, True]]


def test_what_others_computed_calls_nothing():
    rows = Invocations([(7, 8)])
    assert masks(rows, [[8, 1]], 5) == [[False, False]]
    assert masks(rows, [[7, 8]], 7) == [[True, True]]


def test_fewer_tokens_are_the_last():
    rows = Invocations([(7,), None])
    masks(rows, [[1, 7, 2], [1, 2, 3]])
    assert rows.mask(1, CPU).tolist() == [[True], [True]]
    masks(rows, [[1, 2, 2], [1, 2, 3]])
    assert rows.mask(2, CPU).tolist() == [[False], [False], [True], [True]]


def test_it_cannot_be_guessed():
    rows = Invocations([(7,)])
    with pytest.raises(BatchError, match="token ids"):
        rows.mask(2, CPU)
    with pytest.raises(BatchError, match="input_ids"):
        rows.see(None)
    with pytest.raises(BatchError, match="1 rows"):
        rows.see(torch.zeros(2, 3))
    rows.see(torch.tensor([[1, 2, 3]]))
    with pytest.raises(BatchError, match="4 tokens a row"):
        rows.mask(4, CPU)
