"""`POST /v1/completions`, against an engine in this process."""

from __future__ import annotations

import math

import pytest
import torch

import branchline
from tests.serving.http.inside import client_of, serving

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def state(model_folder, adapter_folders):
    # In float32, and unquantised, sums of another order do not change a token.
    model = branchline.load_model(model_folder, dtype=torch.float32)
    with serving(model_folder, adapter_folders, model, quant="none") as state:
        yield state


@pytest.fixture(scope="module")
def client(state):
    with client_of(state) as client:
        yield client


def complete(client, **fields):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body)


def answer(client, **fields):
    response = complete(client, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def greedy(state, prompt_tokens, adapter, count):
    """What transformers' own loop makes, token by token, without a cache."""
    tokens = list(prompt_tokens)
    for _ in range(count):
        logits = state.served(torch.tensor([tokens]), adapter_names=[adapter]).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt_tokens) :]


@pytest.mark.parametrize("adapter", [None, "attn", "mlp", "all"])
def test_greedy_answers_are_those_of_the_model(state, client, adapter):
    ids = state.tokenization.encode(PROMPT, True)
    said = answer(client, model=adapter, max_tokens=5)
    expected = greedy(state, ids, adapter, 5)
    assert said["choices"][0]["text"] == state.tokenization.decode(expected, True)
    assert said["model"] == (adapter or state.base_name)
    assert said["usage"]["prompt_tokens"] == len(ids)
    assert said["usage"]["completion_tokens"] == 5


def test_adapters_make_other_answers(client):
    texts = {answer(client, model=name)["choices"][0]["text"] for name in (None, "attn", "all")}
    assert len(texts) == 3


def test_forms_of_a_prompt_are_alike(state, client):
    ids = state.tokenization.encode(PROMPT, True)
    by_text = answer(client)["choices"][0]["text"]
    assert answer(client, prompt=ids)["choices"][0]["text"] == by_text
    both = answer(client, prompt=[PROMPT, "over the lazy dog"])["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    assert both[0]["text"] == by_text
    assert both[1]["text"] == answer(client, prompt="over the lazy dog")["choices"][0]["text"]
    assert answer(client, prompt=[ids, ids])["choices"][1]["text"] == by_text


def test_n_answers_have_seeds_of_their_own(client):
    asked = {"n": 4, "temperature": 1.5, "seed": 7, "max_tokens": 12}
    texts = [choice["text"] for choice in answer(client, **asked)["choices"]]
    assert len(set(texts)) == 4
    assert [choice["text"] for choice in answer(client, **asked)["choices"]] == texts
    alone = answer(client, temperature=1.5, seed=7, max_tokens=12)["choices"][0]["text"]
    assert alone == texts[0]


def test_n_answers_of_several_prompts_are_in_order(client):
    said = answer(client, prompt=[PROMPT, "dog"], n=2, best_of=2)["choices"]
    assert [choice["index"] for choice in said] == [0, 1, 2, 3]
    assert said[0]["text"] == said[1]["text"] != said[2]["text"] == said[3]["text"]


def test_echo(client):
    plain = answer(client)["choices"][0]["text"]
    assert answer(client, echo=True)["choices"][0]["text"] == PROMPT + plain


def test_logprobs_are_those_of_the_model(state, client):
    ids = state.tokenization.encode(PROMPT, True)
    told = answer(client, logprobs=3, max_tokens=2)["choices"][0]["logprobs"]
    logits = state.served(torch.tensor([ids])).logits[0, -1].float()
    expected = logits.log_softmax(-1).topk(3)
    assert told["token_logprobs"][0] == pytest.approx(float(expected.values[0]), abs=0.05)
    assert told["tokens"][0] == state.tokenization.name_of(int(expected.indices[0]))
    assert len(told["top_logprobs"][0]) == 3
    assert told["text_offset"][0] == 0
    assert all(math.isfinite(value) for value in told["token_logprobs"])


def test_stop_strings_end_the_answer(client):
    whole = answer(client, max_tokens=30)["choices"][0]
    assert whole["finish_reason"] == "length"
    text = whole["text"]
    stop = text[9:12]
    cut = text[: text.index(stop)]
    stopped = answer(client, max_tokens=30, stop=[stop, "nowhere"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (cut, "stop")
    assert stopped["stop_reason"] == stop
    kept = answer(client, max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == cut + stop
    late = answer(client, max_tokens=30, min_tokens=30, stop=stop, ignore_eos=False)["choices"][0]
    assert late["text"] == text


def test_stop_tokens_end_the_answer(state, client):
    ids = state.tokenization.encode(PROMPT, True)
    made = greedy(state, ids, None, 6)
    last = next(place for place in range(1, 6) if made[place] not in made[:place])
    said = answer(client, max_tokens=6, stop_token_ids=[made[last]])
    assert said["choices"][0]["text"] == state.tokenization.decode(made[:last], True)
    assert said["choices"][0]["stop_reason"] == made[last]
    assert said["usage"]["completion_tokens"] == last + 1


def test_logit_bias_and_min_tokens(state, client):
    ids = dict.fromkeys(state.tokenization.encode("q", False), 100.0)
    said = answer(client, logit_bias={str(token): bias for token, bias in ids.items()})
    assert said["choices"][0]["text"] == "q" * 8
    end = state.tokenizer.eos_token_id
    forced = {"logit_bias": {str(end): 100.0}, "ignore_eos": False, "max_tokens": 6}
    assert answer(client, **forced)["usage"]["completion_tokens"] == 1
    assert answer(client, **forced)["choices"][0]["finish_reason"] == "stop"
    assert answer(client, **forced, min_tokens=3)["usage"]["completion_tokens"] == 4


def test_default_length_is_sixteen(client):
    response = client.post("/v1/completions", json={"prompt": PROMPT, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 16


def test_prefix_cache_is_told(client):
    long = "jumps over " * 20
    answer(client, prompt=long)
    cached = answer(client, prompt=long)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    of_adapter = answer(client, prompt=long, model="attn")["usage"]["prompt_tokens_details"]
    assert of_adapter["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["ok", ""]}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [999_999]}, "prompt", "999999"),
        ({"prompt": "fox " * 4000}, "prompt", "1024"),
        ({"max_tokens": 2000}, "max_tokens", "2000"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"min_tokens": 9}, "min_tokens", "9"),
        ({"n": 17}, "n", "16"),
        ({"n": 2, "best_of": 3}, "best_of", "best_of"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"echo": True, "logprobs": 1}, "logprobs", "echo"),
        ({"suffix": "x"}, "suffix", "not served"),
        ({"temperature": -1}, "temperature", "greater"),
        ({"top_p": 0}, "top_p", "greater"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"no_such_field": 1, "another": 2}, "no_such_field", "another"),
        ({"seed": 2**64}, "seed", "less"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, fields, param, words):
    response = complete(client, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0] == param
    assert words in error["message"]
    assert error["code"] == 400


@pytest.mark.parametrize("text", ['{"temperature": NaN, "prompt": "x"}', "{", "[1", '"x"', ""])
def test_bodies_that_are_no_sound_json(client, text):
    response = client.post(
        "/v1/completions", content=text, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"


def test_unknown_models_are_not_found(client):
    response = complete(client, model="nobody")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert "`nobody`" in error["message"]
    assert "`attn`" in error["message"]


def test_leases_end_with_their_requests(state, client):
    answer(client, model="all", n=3, stop="e", max_tokens=40, temperature=1.0)
    complete(client, model="all", max_tokens=2000)
    complete(client, model="all", prompt="")
    stats = state.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert state.admission.answers == 0
    version = state.served.adapters._aliases.known("all").version
    assert version.leases == 0
