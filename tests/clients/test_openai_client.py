"""The official openai client against the container, and raw streams as any HTTP client sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import Container

MESSAGES: Any = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "A colour?"}]
GREEDY: Any = {"model": "", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(container: Container) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{container.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"messages": MESSAGES, **GREEDY, **fields})


def test_the_one_model_is_listed(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.object for model in models] == ["model"]
    assert chat(client, model=models[0].id).model == models[0].id


def test_usage_counts_cached_tokens_as_an_int_cold_and_warm(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Name the planets in order, and say which is largest. " * 12}]
    cold, warm = (chat(client, messages=messages).usage for _ in range(2))
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert 0 < warm.prompt_tokens_details.cached_tokens < warm.prompt_tokens
    assert cold.total_tokens == cold.prompt_tokens + cold.completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == chat(client).choices[0].finish_reason


def test_include_usage_gives_a_last_chunk_without_choices(client: openai.OpenAI) -> None:
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == chat(client).usage.completion_tokens
    assert isinstance(last.usage.prompt_tokens_details.cached_tokens, int)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


def test_n_answers_come_in_order_and_are_counted(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, temperature=1, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 24


def test_n_answers_may_be_streamed_at_once(client: openai.OpenAI) -> None:
    texts = ["", ""]
    for chunk in chat(client, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] == texts[1] == chat(client).choices[0].message.content


def test_the_same_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    first, second, other = (
        chat(client, temperature=1, seed=seed, max_tokens=24).choices[0].message.content for seed in (11, 11, 12)
    )
    assert first == second != other


def test_an_answer_ends_before_a_stop_string(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Count from 1 to 9 with commas: 1, 2, 3"}]
    free = chat(client, messages=messages, max_tokens=24).choices[0].message.content
    stop = free[len(free) // 2 :][:2]
    choice = chat(client, messages=messages, max_tokens=24, stop=[stop]).choices[0]
    assert choice.message.content == free.partition(stop)[0]
    assert choice.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_answer(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    said = bytes(byte for token in tokens for byte in token.bytes or token.token.encode()).decode("utf-8", "replace")
    assert choice.message.content in said
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    # Greedy: the chosen token is the likeliest.
    assert all(token.logprob == max(top.logprob for top in token.top_logprobs) for token in tokens)


def test_content_parts_of_type_text_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "A "}, {"type": "text", "text": "colour?"}]
    joined = [MESSAGES[0], {"role": "user", "content": parts}]
    assert chat(client, messages=joined).choices[0].message.content == chat(client).choices[0].message.content


def test_completions_take_text_and_token_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="The sea is", **GREEDY)
    several = client.completions.create(prompt=["The sea is", "One, two,"], **GREEDY)
    assert several.choices[0].text == text.choices[0].text
    assert [choice.index for choice in several.choices] == [0, 1]
    assert client.completions.create(prompt=[1, 2, 3], **GREEDY).usage.prompt_tokens == 3  # type: ignore[union-attr]


def test_a_completion_streams(client: openai.OpenAI) -> None:
    chunks = client.completions.create(prompt="The sea is", stream=True, **GREEDY)
    whole = client.completions.create(prompt="The sea is", **GREEDY).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"made_up": 1}}, openai.BadRequestError, "made_up"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, openai.UnprocessableEntityError, None),
    ],
)
def test_a_refusal_is_the_error_that_the_client_knows(
    client: openai.OpenAI, fields: Any, kind: type[openai.APIStatusError], param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        chat(client, **fields)
    assert caught.value.type == "invalid_request_error"
    assert param in (None, caught.value.param)
    assert caught.value.request_id


def test_fields_that_change_nothing_here_are_taken(client: openai.OpenAI) -> None:
    ignored: Any = {"user": "u", "store": False, "metadata": {"a": "b"}, "parallel_tool_calls": True}
    assert chat(client, **ignored).choices[0].message.content == chat(client).choices[0].message.content


async def _first_chunks(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


def test_the_asynchronous_client_streams_too(container: Container, client: openai.OpenAI) -> None:
    assert asyncio.run(_first_chunks(container.url)) == chat(client).choices[0].message.content


def test_a_raw_stream_is_data_lines_and_ends_with_done(container: Container) -> None:
    body = {"messages": MESSAGES, **GREEDY, "stream": True}
    with httpx.stream("POST", f"{container.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        text = response.read().decode()
    *events, last, end = text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


def test_every_piece_of_a_raw_stream_is_whole_utf8_lines(container: Container) -> None:
    body = {"inputs": "Repeat: naïve 日本語 🙂 naïve 日本語 🙂", "stream": True, "parameters": {"max_new_tokens": 32}}
    with httpx.stream("POST", f"{container.url}/invocations", json=body, timeout=60) as response:
        pieces = list(response.iter_raw())
    assert len(pieces) > 1
    assert all(piece.decode("utf-8").endswith("\n\n") for piece in pieces)
