"""What the engine answers is what the library answers for the request alone."""

import pytest
import torch

from tests.serving.engine.conftest import alone, is_answer, prompt

NAMES = ["attn", None, "mlp", "all", None, "mlp", "attn", None]
LENGTHS = [5, 1, 40, 17, 3, 33, 20, 64]


def test_mixed_batches_answer_as_each_request_alone(family, serve):
    # float32 and no quantisation: sums of another order do not change a token there.
    served = family.served(torch.float32, quant="none", max_loras=4)
    prompts = [prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    # Few tokens a step: long prompts take several, beside others that decode.
    client = serve(served, max_num_batched_tokens=24)
    answers = [client.ask(p, name) for p, name in zip(prompts, NAMES, strict=True)]
    ends = [answer.wait() for answer in answers]
    assert [len(end.ids) for end in ends] == [12] * len(prompts)
    for p, name, answer in zip(prompts, NAMES, answers, strict=True):
        assert is_answer(served, p, answer.ids, name)


@pytest.mark.parametrize("policy", ["dynamic", "dual", "absorbed"])
def test_quantised_answers_differ_only_where_logits_are_close(llama, serve, policy):
    served = llama.served(torch.bfloat16, quant="fp8-dynamic", max_loras=4, policy=policy)
    prompts = [prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    client = serve(served)
    answers = [client.ask(p, name) for p, name in zip(prompts, NAMES, strict=True)]
    for p, name, answer in zip(prompts, NAMES, answers, strict=True):
        ids = answer.wait().ids
        # Teacher-forced: the library's logits along the engine's own answer.
        logits = served(torch.tensor([p + ids]), adapter_names=[name]).logits[0, len(p) - 1 : -1]
        best = logits.amax(-1)
        chosen = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        # bfloat16 logits lie up to 2^-8 of their size apart, and an FP8 code that rounds the other
        # way moves them by a few of these steps; a wrong cache or slot moves them by their size.
        assert (best - chosen).max() <= 0.08 * logits.abs().max(), (name, best - chosen)


def test_one_request_of_one_token(served, serve):
    client = serve(served)
    answer = client.ask([7], max_tokens=1).wait()
    assert answer.ids == alone(served, [7], new=1)
    assert answer.finish == "length"


def test_cache_that_holds_few_blocks_makes_requests_wait_and_begin_anew(served, serve):
    prompts = [prompt(20, seed) for seed in range(6)]
    # Each takes 50 tokens, 4 blocks of 16; all at once would take 24.
    client = serve(served, num_gpu_blocks_override=9, enable_prefix_caching=False)
    answers = [client.ask(p, max_tokens=30) for p in prompts]
    ends = [answer.wait() for answer in answers]
    assert [len(end.ids) for end in ends] == [30] * len(prompts)
    for p, answer in zip(prompts, answers, strict=True):
        assert is_answer(served, p, answer.ids)
    stats = client.engine.stats()
    assert stats.preemptions > 0
    assert stats.used_blocks == 0


def test_more_adapters_than_slots_take_turns(llama, serve):
    served = llama.served(torch.float32, quant="none", max_loras=1)
    names = ["attn", "mlp", "all", None] * 2
    prompts = [prompt(9, seed) for seed in range(len(names))]
    client = serve(served, max_loras=1, adapter_turn_steps=4)
    answers = [client.ask(p, name, max_tokens=20) for p, name in zip(prompts, names, strict=True)]
    ends = [answer.wait() for answer in answers]
    assert [len(end.ids) for end in ends] == [20] * len(prompts)
    for p, name, answer in zip(prompts, names, answers, strict=True):
        assert is_answer(served, p, answer.ids, name)


def test_sliding_windows_shorter_than_prompts(make_family, serve):
    served = make_family("gemma3").served(torch.float32, quant="none")
    prompts = [prompt(n, n) for n in (7, 8, 9, 30)]
    client = serve(served, max_num_batched_tokens=11)
    answers = [client.ask(p, "all", max_tokens=24) for p in prompts]
    ends = [answer.wait() for answer in answers]
    assert [len(end.ids) for end in ends] == [24] * len(prompts)
    for p, answer in zip(prompts, answers, strict=True):
        assert is_answer(served, p, answer.ids, "all")


def test_model_answers_as_before_once_the_engine_has_stopped(served, serve):
    tokens = prompt(12)
    before = alone(served, tokens, "all")
    client = serve(served)
    # Outside of the engine's steps the model computes as ever, even beside it.
    assert alone(served, tokens, "all") == before
    assert client.engine.stop(5)
    assert alone(served, tokens, "all") == before
