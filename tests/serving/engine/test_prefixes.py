"""Shared beginnings: of one adapter content only (I9)."""

import shutil

from branchline.serving.engine.requests import GenerationRequest, Sampling
from branchline.serving.engine.sequence import Sequence
from tests.models import build, save_adapter
from tests.serving.engine.conftest import alone, prompt


def test_equal_beginnings_are_computed_once(served, serve):
    client = serve(served)
    first = prompt(50)
    assert client.ask(first).wait().cached == 0
    again = client.ask(first).wait()
    assert again.cached == 48
    assert again.ids == alone(served, first)
    longer = client.ask([*first, 9, 9, 9]).wait()
    assert longer.cached == 48
    assert longer.ids == alone(served, [*first, 9, 9, 9])
    assert client.engine.stats().cached_tokens == 96


def test_answers_are_shared_too(served, serve):
    client = serve(served)
    tokens = prompt(20)
    answer = client.ask(tokens, max_tokens=30).wait().ids
    following = client.ask([*tokens, *answer, 5]).wait()
    assert following.cached == 48
    assert following.ids == alone(served, [*tokens, *answer, 5])


def test_adapters_versions_and_the_base_never_share(served, serve, llama, tmp_path):
    client = serve(served)
    tokens = prompt(50)
    wanted = {name: alone(served, tokens, name) for name in ("attn", "mlp", None)}
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    for name in ("attn", "mlp", None):
        answer = client.ask(tokens, name).wait()
        assert (answer.cached, answer.ids) == (0, wanted[name])
    newer = save_adapter(build("llama"), tmp_path / "new", ["q_proj"], rank=8, seed=77)
    served.adapters.swap("attn", newer)
    answer = client.ask(tokens, "attn").wait()
    assert (answer.cached, answer.ids) == (0, alone(served, tokens, "attn"))
    assert answer.ids != wanted["attn"]
    # The old content under another name is the old content.
    served.adapters.load("old", llama.folders["attn"])
    answer = client.ask(tokens, "old").wait()
    assert (answer.cached, answer.ids) == (48, wanted["attn"])


def test_reload_in_place_from_the_same_path_takes_no_old_block(served, serve, tmp_path):
    folder = save_adapter(build("llama"), tmp_path / "x", ["q_proj"], rank=8, seed=1)
    served.adapters.load("x", folder)
    client = serve(served)
    tokens = prompt(40)
    before = client.ask(tokens, "x").wait().ids
    shutil.rmtree(folder)
    save_adapter(build("llama"), tmp_path / "x", ["q_proj", "down_proj"], rank=8, seed=2)
    served.adapters.reload("x")
    answer = client.ask(tokens, "x").wait()
    assert answer.cached == 0
    assert answer.ids == alone(served, tokens, "x") != before


def test_siblings_wait_for_the_first_to_fill_their_blocks(served, serve):
    client = serve(served, run=False)
    tokens = prompt(60)
    answers = [client.ask(tokens, "all") for _ in range(4)]
    client.engine.start()
    assert sorted(answer.wait().cached for answer in answers) == [0, 48, 48, 48]
    assert {tuple(answer.ids) for answer in answers} == {tuple(alone(served, tokens, "all"))}


def test_blocks_that_were_lost_again_are_not_told_as_cached(served, serve):
    client = serve(served, num_gpu_blocks_override=5, run=False)
    scheduler, cache = client.engine._scheduler, client.engine._cache
    client.engine.start()
    first = prompt(40)
    client.ask(first).wait()
    sequence = Sequence(
        GenerationRequest("late", tuple(first), Sampling(), print), cache.root(None), 9, 0, 99
    )
    cache.adopt_prefix(sequence)
    assert sequence.cached_tokens == 32
    cache.free(sequence)
    assert (sequence.cached_tokens, sequence.position) == (0, 0)
    assert not scheduler.has_work


def test_switched_off(served, serve):
    client = serve(served, enable_prefix_caching=False)
    tokens = prompt(50)
    assert client.ask(tokens).wait().ids == client.ask(tokens).wait().ids
    assert client.engine.stats().cached_tokens == 0


def test_blocks_that_nobody_uses_make_room(served, serve):
    client = serve(served, num_gpu_blocks_override=8)
    for seed in range(6):
        tokens = prompt(60, seed)
        assert client.ask(tokens).wait().ids == alone(served, tokens)
    assert client.engine.stats().used_blocks == 0
