"""`POST /v1/chat/completions`, against an engine in this process."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.serving.http.conftest import CHAT_TEMPLATE
from tests.serving.http.inside import client_of, serving

MESSAGES = [{"role": "user", "content": "quick fox"}]


@pytest.fixture(scope="module")
def state(model_folder, adapter_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "templated"
    shutil.copytree(adapter_folders["attn"], folder)
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }} over")
    with serving(model_folder, {**adapter_folders, "own": folder}) as state:
        yield state


@pytest.fixture(scope="module")
def client(state):
    with client_of(state) as client:
        yield client


def chat(client, **fields):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
    return client.post("/v1/chat/completions", json=body)


def answer(client, **fields):
    response = chat(client, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def completion(client, prompt, **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_a_chat_is_its_template_completed(client):
    said = answer(client)
    prompt = "<|user|>quick fox<|end|><|assistant|>"
    choice = said["choices"][0]
    assert choice["message"]["content"] == completion(client, prompt)
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert said["object"] == "chat.completion"
    assert said["usage"]["completion_tokens"] == 8


def test_parts_of_text_are_joined(client):
    parts = [{"type": "text", "text": "quick"}, {"type": "text", "text": "fox"}]
    said = answer(client, messages=[{"role": "user", "content": parts}])
    prompt = "<|user|>quick\nfox<|end|><|assistant|>"
    assert said["choices"][0]["message"]["content"] == completion(client, prompt)


def test_an_adapter_brings_its_own_template(client):
    said = answer(client, model="own")["choices"][0]["message"]["content"]
    assert said == completion(client, "quick fox over", model="attn")
    assert said != answer(client, model="attn")["choices"][0]["message"]["content"]


def test_going_on_with_a_message(client):
    messages = [*MESSAGES, {"role": "assistant", "content": "the lazy"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    said = answer(client, messages=messages, **fields)["choices"][0]["message"]["content"]
    prompt = "<|user|>quick fox<|end|><|assistant|>the lazy"
    assert said == completion(client, prompt)


def test_the_answer_may_fill_what_is_left(client):
    said = chat(client, max_tokens=None, logit_bias={"5": 100}).json()
    assert said["usage"]["total_tokens"] == 1024
    other = chat(client, max_tokens=None, max_completion_tokens=3).json()
    assert other["usage"]["completion_tokens"] == 3


def test_logprobs(state, client):
    told = answer(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(told) == 8
    for entry in told:
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert entry["token"] == entry["top_logprobs"][0]["token"]
    text = b"".join(bytes(entry["bytes"]) for entry in told).decode(errors="replace")
    assert text.startswith(answer(client)["choices"][0]["message"]["content"][:3])
    plain = answer(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[]] * 8


def events_of(client, **fields):
    response = chat(client, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("model", [None, "attn", "all"])
def test_a_stream_says_the_same(client, model):
    events = events_of(client, model=model, n=2, stop=["nothing"])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    for index in range(2):
        choices = [c for e in events for c in e["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["finish_reason"] == "length"
        said = "".join(choice["delta"].get("content", "") for choice in choices)
        assert said == answer(client, model=model)["choices"][0]["message"]["content"]


def test_usage_of_a_stream(client):
    events = events_of(client, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert all(event["usage"] is None for event in events[:-1])
    always = {"include_usage": True, "continuous_usage_stats": True}
    counts = [e["usage"]["completion_tokens"] for e in events_of(client, stream_options=always)]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert all("usage" not in event for event in events_of(client))


def test_stops_do_not_leak_into_a_stream(client):
    whole = answer(client, max_tokens=40)["choices"][0]["message"]["content"]
    stop = whole[15:18]
    events = events_of(client, max_tokens=40, stop=stop, logprobs=True)
    choices = [choice for event in events for choice in event["choices"]]
    said = "".join(choice["delta"].get("content", "") for choice in choices)
    assert said == whole[: whole.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    named = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert len(b"".join(bytes(entry["bytes"]) for entry in named).decode(errors="replace")) >= len(
        said
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}, {"content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "x": 1}]}]},
            "messages",
            "input_audio",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "not served"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs", "20"),
        ({"max_completion_tokens": 9}, "max_completion_tokens", "differ"),
        ({"chat_template": "{{ x }}"}, "chat_template", "not served"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"messages": [{"role": "user", "content": "fox " * 4000}]}, "messages", "1024"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, fields, param, words):
    for stream in (False, True):
        response = chat(client, **{**fields, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"].split(".")[0] == param
        assert words in error["message"]


def test_an_unknown_model_has_its_status_in_a_stream_too(client):
    assert chat(client, model="nobody", stream=True).status_code == 404


def test_a_template_of_the_server_goes_before_all(model_folder):
    template = CHAT_TEMPLATE.replace("<|assistant|>", "dog")
    with serving(model_folder, {}, chat_template=template) as state, client_of(state) as client:
        said = answer(client)["choices"][0]["message"]["content"]
        assert said == completion(client, "<|user|>quick fox<|end|>dog")
