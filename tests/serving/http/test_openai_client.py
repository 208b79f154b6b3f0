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


def test_many_at_once_say_what_each_says_alone(server):
    names = [server.model, *server.adapters]

    async def all_of(count):
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def ask(model):
                said = await client.chat.completions.create(model=model, messages=MESSAGES, **ASKED)
                return said.choices[0].message.content

            async def streamed(model):
                text = ""
                async for event in await client.chat.completions.create(
                    model=model, messages=MESSAGES, stream=True, **ASKED
                ):
                    text += event.choices[0].delta.content or ""
                return text

            alone = {name: await ask(name) for name in names}
            asked = [names[n % len(names)] for n in range(count)]
            texts = await asyncio.gather(
                *((streamed if n % 2 else ask)(name) for n, name in enumerate(asked))
            )
            return alone, asked, texts

    alone, asked, texts = asyncio.run(all_of(24))
    assert len(set(alone.values())) > 1
    assert [alone[name] for name in asked] == texts


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
