"""The OpenAI routes, through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fakes import expected_text
from server.conftest import Site

CHAT: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ANSWER = expected_text("user:hi\n", 4)


@pytest.fixture
def official(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered(official: openai.OpenAI) -> None:
    answer = official.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 4)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_the_second_chat_of_a_template_reports_its_hit(official: openai.OpenAI) -> None:
    official.chat.completions.create(**CHAT)
    answer = official.chat.completions.create(**CHAT)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.model_extra is not None
    assert answer.model_extra["kv_cache"]["tier"] == "device"


def test_n_answers_are_numbered(official: openai.OpenAI) -> None:
    answer = official.chat.completions.create(**CHAT, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [
        expected_text("user:hi\n", 4, index=i) for i in range(3)
    ]


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_adds_up(official: openai.OpenAI, n: int) -> None:
    texts, reasons = [""] * n, [None] * n
    for chunk in official.chat.completions.create(**CHAT, stream=True, n=n):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [expected_text("user:hi\n", 4, index=i) for i in range(n)]
    assert reasons == ["length"] * n


def test_the_last_chunk_reports_usage_without_being_asked(official: openai.OpenAI) -> None:
    chunks = list(official.chat.completions.create(**CHAT, stream=True))
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].choices[0].finish_reason == "length"


def test_include_usage_adds_a_chunk_without_choices(official: openai.OpenAI) -> None:
    chunks = list(official.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_logprobs_name_the_token_and_its_rivals(official: openai.OpenAI) -> None:
    answer = official.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == ANSWER
    assert [len(token.top_logprobs) for token in logprobs.content] == [2] * 4


def test_text_parts_tools_and_template_variables_reach_the_template(official: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    tool: Any = {"type": "function", "function": {"name": "look"}}
    answer = official.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": parts}],
        tools=[tool],
        max_completion_tokens=3,
        extra_body={"chat_template_kwargs": {"date": "today"}},
    )
    assert answer.choices[0].message.content == expected_text("tool:look\ndate=today\nuser:hi\n", 3)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("hi", ["hi"]), (["hi", "ho"], ["hi", "ho"]), ([104, 105], ["hi"]), ([[104, 105], [104]], ["hi", "h"])],
)
def test_completions_take_text_and_token_ids(official: openai.OpenAI, prompt: Any, prompts: list[str]) -> None:
    answer = official.completions.create(model="", prompt=prompt, max_tokens=3, n=2)
    assert [choice.text for choice in answer.choices] == [
        expected_text(text, 3, index=i) for text in prompts for i in range(2)
    ]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))


def test_streamed_completions_of_several_prompts_are_numbered(official: openai.OpenAI) -> None:
    texts = ["", ""]
    for chunk in official.completions.create(model="", prompt=["hi", "ho"], max_tokens=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [expected_text("hi", 3), expected_text("ho", 3)]


def test_a_completion_with_logprobs_keeps_their_order(official: openai.OpenAI) -> None:
    choice = official.completions.create(model="", prompt="hi", max_tokens=3, logprobs=1).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list(expected_text("hi", 3))
    assert choice.logprobs.token_logprobs == [-0.5] * 3


def test_the_model_is_listed(official: openai.OpenAI) -> None:
    assert [model.id for model in official.models.list()] == ["fake"]


def test_a_bad_field_raises_bad_request(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 2, got 3"):
        official.chat.completions.create(**CHAT, temperature=3)


def test_a_fault_in_a_stream_raises(official: openai.OpenAI, site: Site) -> None:
    site.engine.step_s = 0.01
    with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
        for _ in official.chat.completions.create(**CHAT | {"max_tokens": 5_000}, stream=True):
            site.engine.crash_step()


def test_fields_without_an_effect_are_ignored_and_unknown_ones_are_not(official: openai.OpenAI) -> None:
    assert official.chat.completions.create(**CHAT, user="me", store=True).choices
    with pytest.raises(openai.BadRequestError, match="did you mean 'max_tokens'"):
        official.chat.completions.create(**CHAT, extra_body={"max_token": 5})
