"""Who comes next: no adapter starves, whatever the others send."""

import itertools

import pytest

from branchline.serving.engine.scheduler import Seats
from tests.serving.engine.conftest import prompt


def test_all_have_seats_while_slots_last():
    seats = Seats({16: 2}, turn=3)
    assert seats.choose({"a": 8, "b": 16}) == {"a", "b"}


def test_those_that_wait_take_turns():
    seats = Seats({16: 2}, turn=3)
    wanted = dict.fromkeys("abcde", 8)
    served = [seats.choose(wanted) for _ in range(300)]
    assert all(len(chosen) == 2 for chosen in served)
    for name in wanted:
        gaps = [step for step, chosen in enumerate(served) if name in chosen]
        longest = max(b - a for a, b in itertools.pairwise(gaps))
        assert longest <= 3 * 3 + 1, name
        assert 300 * 2 / 5 * 0.8 <= len(gaps) <= 300 * 2 / 5 * 1.2, name
    # A turn is not cut short: slots are filled as seldom as may be.
    changes = sum(a != b for a, b in itertools.pairwise(served))
    assert changes <= 300 / 3 + 1


def test_ranks_find_slots_of_their_class():
    seats = Seats({8: 1, 64: 1}, turn=1)
    assert seats.choose({"small": 4, "large": 32}) == {"small", "large"}
    assert len(seats.choose({"large": 32, "larger": 64})) == 1
    both = [seats.choose({"s": 4, "l": 32, "m": 64}) for _ in range(12)]
    assert all("s" in chosen or "m" in chosen or "l" in chosen for chosen in both)
    assert set().union(*both) == {"s", "l", "m"}


def test_crowd_of_one_adapter_does_not_keep_others_out(served, serve):
    client = serve(served, run=False, max_num_seqs=4)
    crowd = [client.ask(prompt(6, s), "attn", max_tokens=30) for s in range(40)]
    late = client.ask(prompt(6), "mlp", max_tokens=2)
    base = client.ask(prompt(6), None, max_tokens=2)
    client.engine.start()
    late.wait()
    base.wait()
    finished = sum(answer.updates.qsize() == 30 for answer in crowd)
    assert finished <= 8
    assert all(len(answer.wait().ids) == 30 for answer in crowd)


@pytest.mark.parametrize("seqs", [1, 3, 64])
def test_no_more_sequences_than_asked_for(served, serve, seqs, monkeypatch):
    client = serve(served, run=False, max_num_seqs=seqs)
    seen = []
    run = client.engine._runner.run
    monkeypatch.setattr(
        client.engine._runner, "run", lambda step: (seen.append(len(step.shares)), run(step))[1]
    )
    answers = [client.ask(prompt(4, s), max_tokens=5) for s in range(9)]
    client.engine.start()
    assert all(len(answer.wait().ids) == 5 for answer in answers)
    assert max(seen) == min(seqs, 9)


def test_long_prompts_do_not_hold_up_those_that_decode(served, serve, monkeypatch):
    client = serve(served, max_num_batched_tokens=16)
    quick = client.ask(prompt(4), max_tokens=60)
    quick.take()
    long = client.ask(prompt(300), max_tokens=1)
    long.wait()
    # 300 tokens by 15 a step: the other got a token in each of those steps.
    assert quick.updates.qsize() >= 19
    assert len(quick.wait().ids) == 60
