"""OpenAI's own client, unchanged, against a server process."""

from __future__ import annotations

import asyncio

import openai
import pytest

MESSAGES = [{"role": "user", "content": "quick fox"}]
ASKED = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(server, client):
    listed = [model.id for model in client.models.list()]
    assert listed[0] == server.model
    assert set(server.adapters) <= set(listed)
    assert client.models.retrieve("attn").id == "attn"


def test_completions(server, client):
    said = client.completions.create(model=server.model, prompt="the quick", n=2, **ASKED)
    assert said.usage.completion_tokens == 24
    assert said.usage.prompt_tokens_details.cached_tokens >= 0
    assert said.choices[0].text == said.choices[1].text
    stream = client.completions.create(
        model=server.model, prompt="the quick", stream=True, logprobs=2, **ASKED
    )
    events = list(stream)
    assert "".join(event.choices[0].text for event in events) == said.choices[0].text
    tokens = [t for e in events if e.choices[0].logprobs for t in e.choices[0].logprobs.tokens]
    assert len(tokens) == 12


@pytest.mark.parametrize("model", ["attn", "mlp", "all"])
def test_chats(client, model):
    said = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, **ASKED
    )
    assert said.model == model
    assert len(said.choices[0].logprobs.content) == 12
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **ASKED
    )
    events = list(stream)
    pieces = [choice.delta.content or "" for event in events for choice in event.choices]
    assert "".join(pieces) == said.choices[0].message.content
    assert events[-1].usage.completion_tokens == 12


def test_many_at_once_get_each_its_own(server):
    """Which token is likeliest is forced, so that no answer can be taken for another's."""
    names = [server.model, *server.adapters]
    # Single bytes, after the special tokens.
    tokens = range(20, 32)

    async def ask(client, model, bias, stream):
        fields = {**ASKED, "logit_bias": {bias: 100}, "model": model, "messages": MESSAGES}
        if not stream:
            said = await client.chat.completions.create(**fields)
            return said.choices[0].message.content
        events = await client.chat.completions.create(**fields, stream=True)
        return "".join([event.choices[0].delta.content or "" async for event in events])

    async def all_of(count):
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asks = (
                ask(client, names[n % len(names)], str(tokens[n % len(tokens)]), bool(n % 2))
                for n in range(count)
            )
            return await asyncio.gather(*asks)

    texts = asyncio.run(all_of(48))
    assert all(text == text[0] * 12 for text in texts)
    assert [text[0] for text in texts] == [text[0] for text in texts[:12]] * 4
    assert len({text[0] for text in texts}) == 12


def test_errors_are_the_clients_own(server, client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=server.model,
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model=server.model, input="x")
