"""How tokens are chosen."""

import math

import pytest
import torch

from branchline.serving.engine.requests import GenerationRequest, Sampling, Token
from branchline.serving.engine.sampling import choose, finite_rows, is_stop
from branchline.serving.engine.sequence import Sequence
from tests.serving.engine.conftest import alone, prompt

STOPS = frozenset({2})


def sequence(tokens=(1, 1), made=(), seed=0, **sampling) -> Sequence:
    request = GenerationRequest("r", tuple(tokens), Sampling(**sampling), lambda update: None)
    found = Sequence(request, 0, 0, seed, 8)
    for token in made:
        found.append(Token(token))
    return found


def shares(logits, draws=4000, **sampling) -> torch.Tensor:
    """How often each token is drawn."""
    one = sequence(temperature=sampling.pop("temperature", 1.0), **sampling)
    rows = [choose(logits[None], [one], STOPS)[0].id for _ in range(draws)]
    return torch.bincount(torch.tensor(rows), minlength=logits.shape[0]) / draws


def test_greedy_takes_the_likeliest():
    logits = torch.randn(5, 40)
    rows = [sequence(temperature=0.0) for _ in range(5)]
    assert [t.id for t in choose(logits, rows, STOPS)] == logits.argmax(-1).tolist()


def test_temperature_draws_by_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        wanted = torch.softmax(logits / temperature, -1)
        assert (shares(logits, temperature=temperature) - wanted).abs().max() < 0.03


def test_top_k_top_p_and_min_p_leave_only_the_likeliest():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    assert (shares(logits, top_k=2) - torch.tensor([0, 2 / 3, 0, 1 / 3])).abs().max() < 0.03
    # 0.5 does not reach 0.6, so that 0.25 is kept as well.
    assert (shares(logits, top_p=0.6) - torch.tensor([0, 2 / 3, 0, 1 / 3])).abs().max() < 0.03
    assert shares(logits, top_p=0.5).tolist() == [0, 1, 0, 0]
    assert shares(logits, top_p=1e-9, draws=50).tolist() == [0, 1, 0, 0]
    kept = shares(logits, min_p=0.4)
    assert (kept - torch.tensor([0, 2 / 3, 0, 1 / 3])).abs().max() < 0.03
    assert shares(logits, top_k=3, top_p=0.9999, min_p=0.25)[0] == 0


def test_seed_and_not_the_neighbours_decide():
    torch.manual_seed(0)
    logits = torch.randn(30, 100)

    def drawn(others: int) -> list[int]:
        mine = sequence(seed=1, **{"temperature": 1.0})
        rows = [mine, *(sequence(seed=9) for _ in range(others))]
        return [
            choose(torch.stack([step, *torch.randn(others, 100)]), rows, STOPS)[0].id
            for step in logits
        ]

    assert drawn(0) == drawn(3)
    same = [choose(logits[:1], [sequence(seed=s, **{})], STOPS)[0].id for s in range(20)]
    assert len(set(same)) > 1


def test_penalties_and_biases():
    logits = torch.tensor([[1.0, -1.0, 0.5, 2.0]])

    def best(**settings) -> int:
        made = settings.pop("made", ())
        return choose(logits, [sequence(made=made, temperature=0.0, **settings)], STOPS)[0].id

    assert best() == 3
    assert best(made=(3,), presence_penalty=1.5) == 0
    assert best(made=(3, 3, 3), frequency_penalty=0.4) == 0
    assert best(made=(3,), frequency_penalty=0.4) == 3
    assert best(made=(3,), repetition_penalty=3.0) == 0
    # A prompt's tokens count for the repetition penalty, not for the others.
    assert best(tokens=(3,), repetition_penalty=3.0) == 0
    assert best(tokens=(3,), presence_penalty=1.5) == 3
    assert best(logit_bias={1: 100.0}) == 1
    assert best(logit_bias={3: -100.0}) == 0


def test_stop_tokens_wait_for_the_least_length():
    logits = torch.tensor([[0.0, 0.0, 9.0, 1.0, 5.0]])
    at = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": frozenset({4})}
    assert choose(logits, [sequence(**at)], STOPS)[0].id == 3
    assert choose(logits, [sequence(made=(3, 3), **at)], STOPS)[0].id == 2
    assert choose(logits, [sequence(ignore_eos=True, **at)], STOPS)[0].id == 2
    # Nothing is forbidden where nothing stops.
    free = {"temperature": 0.0, "min_tokens": 9, "ignore_eos": True, "logit_bias": {1: 9.5}}
    assert choose(logits, [sequence(**free)], STOPS)[0].id == 1
    assert is_stop(sequence(**at), 2, STOPS)
    assert is_stop(sequence(**at), 4, STOPS)
    assert not is_stop(sequence(ignore_eos=True), 2, STOPS)


def test_logprobs_are_those_of_the_unchanged_logits():
    torch.manual_seed(1)
    logits = torch.randn(2, 50)
    rows = [sequence(temperature=0.0, logprobs=3, logit_bias={7: 99.0}), sequence(logprobs=None)]
    told, untold = choose(logits, rows, STOPS)
    wanted = torch.log_softmax(logits[0], -1)
    assert told.id == 7
    assert math.isclose(told.logprob, float(wanted[7]), rel_tol=1e-6)
    values, order = torch.topk(wanted, 3)
    assert [t for t, _ in told.top] == order.tolist()
    assert [p for _, p in told.top] == pytest.approx(values.tolist())
    assert (untold.logprob, untold.top) == (None, ())


def test_rows_that_are_not_finite_are_found():
    rows = torch.zeros(5, 4)
    rows[1, 2] = torch.nan
    rows[2, 0] = torch.inf
    rows[3, 1] = -torch.inf  # a token that the model forbids is no fault
    rows[4] = -torch.inf
    assert finite_rows(rows) == [True, False, False, True, False]


def test_engine_stops_where_the_model_says_so(served, serve):
    tokens = prompt(10)
    free = alone(served, tokens, new=12)
    client = serve(served)
    answer = client.ask(tokens, stop_token_ids=frozenset({free[5]})).wait()
    assert answer.finish == "stop"
    assert answer.ids == free[: free.index(free[5]) + 1]


def test_seeded_answers_do_not_depend_on_the_load(served, serve):
    client = serve(served)
    tokens = prompt(10)
    sampling = {"temperature": 1.3, "seed": 42, "max_tokens": 16}
    quiet = client.ask(tokens, **sampling).wait().ids
    crowd = [client.ask(prompt(20, s), "all", temperature=1.0) for s in range(5)]
    busy = client.ask(tokens, **sampling)
    assert busy.wait().ids == quiet
    assert client.ask(tokens, **{**sampling, "seed": 43}).wait().ids != quiet
    assert all(len(answer.wait().ids) == 12 for answer in crowd)
