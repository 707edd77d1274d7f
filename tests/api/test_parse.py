"""Bodies to calls: defaults, ranges, meanings; and no body whatever does worse than RequestError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreuse.api import openai, sagemaker
from kvreuse.api.call import Call, Chat
from kvreuse.api.fields import parse_object
from kvreuse.errors import RequestError
from kvreuse.types import SamplingParams

Parse = Callable[..., Call]
PARSERS: list[Parse] = [sagemaker.parse, openai.parse_chat, openai.parse_completion]
USER = {"messages": [{"role": "user", "content": "hi"}]}


def hf(**parameters: Any) -> SamplingParams:
    return sagemaker.parse({"inputs": "a", "parameters": parameters}).sampling


def refusal(parse: Parse, body: Mapping[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body)
    return caught.value


def test_without_parameters_an_answer_is_greedy() -> None:
    assert hf() == SamplingParams()


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "typical_p", "min_p"])
def test_a_sampling_parameter_asks_for_sampling(name: str) -> None:
    sampling = hf(**{name: 1})
    assert sampling.temperature == 1
    assert getattr(sampling, name) == 1


def test_do_sample_false_is_greedy_whatever_else_is_set() -> None:
    assert hf(do_sample=False, temperature=0.7, top_p=0.9).temperature == 0


def test_do_sample_true_samples_at_temperature_1() -> None:
    assert hf(do_sample=True).temperature == 1


def test_a_whole_number_may_be_written_with_a_point() -> None:
    assert hf(max_new_tokens=7.0, top_k=9.0) == hf(max_new_tokens=7, top_k=9)
    assert refusal(sagemaker.parse, {"inputs": "a", "parameters": {"max_new_tokens": 7.5}}).status == 400
    assert refusal(sagemaker.parse, {"inputs": "a", "parameters": {"max_new_tokens": 1e300}}).status == 400


def test_every_parameter_arrives_where_it_belongs() -> None:
    values: dict[str, Any] = {
        **{"max_new_tokens": 7, "temperature": 0.5, "top_k": 9, "top_p": 0.25, "typical_p": 0.75, "min_p": 0.125},
        **{"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2, "ignore_eos": True, "seed": 0},
        **{"stop_token_ids": (3, 4), "n": 2},
    }
    sent = values | {"stop": "x", "stop_token_ids": [3, 4], "logit_bias": {"5": -100}, "top_n_tokens": 3}
    expected = SamplingParams(**values, stop=("x",), logit_bias={5: -100.0}, logprobs=3)
    assert hf(**sent) == expected
    for name in ("max_new_tokens", "top_n_tokens"):
        del sent[name]
    chat = openai.parse_chat(USER | sent | {"max_tokens": 7, "logprobs": True, "top_logprobs": 3})
    assert chat.sampling == expected


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("temperature", bad) for bad in (-0.1, 101, "1", True, [])],
        *[("top_p", bad) for bad in (0, 1.01, -1)],
        *[("top_k", bad) for bad in (-1, 1.5, 10**30)],
        *[("min_p", bad) for bad in (-0.1, 1.1)],
        *[("typical_p", bad) for bad in (0, 2)],
        *[("repetition_penalty", bad) for bad in (0, -1, 1e301)],
        *[("presence_penalty", bad) for bad in (-2.1, 2.1)],
        *[("seed", bad) for bad in (0.5, 2**63, "1")],
        *[("n", bad) for bad in (0, 17, 1.5)],
        *[("stop", bad) for bad in ("", [""], [1], ["a"] * 17, {})],
        *[("stop_token_ids", bad) for bad in (5, [-1], [2**31], [True], ["1"])],
        *[("logit_bias", bad) for bad in ({"a": 1}, {"-1": 1}, {"1": 101}, [1])],
        *[("ignore_eos", bad) for bad in (1, "true")],
        *[("stream", bad) for bad in (1, "yes")],
        *[("kv_cache_reuse", bad) for bad in (0, "no")],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(parse: Parse, name: str, bad: Any) -> None:
    is_hf = parse is sagemaker.parse
    body = {"inputs": "a", "parameters": {name: bad}} if is_hf else {**USER, name: bad}
    if parse is openai.parse_completion:
        body = {"prompt": "a", name: bad}
    error = refusal(parse, body)
    assert error.status == 400
    assert (error.param or "").startswith(f"parameters.{name}" if is_hf else name)
    assert f"{name}" in error.message


def test_null_counts_as_absent() -> None:
    nulls = dict.fromkeys(sagemaker.PARAMETERS)
    assert sagemaker.parse({"inputs": "a", "parameters": nulls}).sampling == SamplingParams()
    assert openai.parse_chat(USER | dict.fromkeys(set(openai.CHAT) - {"messages"})).sampling.n == 1


def test_openai_samples_by_default_and_fills_the_context_in_a_chat() -> None:
    chat = openai.parse_chat(USER)
    text = openai.parse_completion({"prompt": "a"})
    assert (chat.sampling.temperature, text.sampling.temperature) == (1, 1)
    assert chat.is_length_open
    assert text.sampling.max_new_tokens == 16


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    call = openai.parse_chat(USER | {"max_tokens": 5, "max_completion_tokens": 6})
    assert (call.sampling.max_new_tokens, call.is_length_open) == (6, False)


def test_a_call_to_a_tool_may_have_no_content() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    (chat,) = openai.parse_chat({"messages": [*USER["messages"], turn]}).prompts
    assert isinstance(chat, Chat)
    assert chat.messages[1] == turn


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [7]}, "messages[0]"),
        (USER | {"tools": [1]}, "tools"),
        (USER | {"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        (USER | {"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_a_bad_chat_is_refused_where_it_is_wrong(body: Mapping[str, Any], param: str) -> None:
    assert refusal(openai.parse_chat, body).param == param


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], [1, "a"], [-1], [[1], 2], [True], {}])
def test_a_bad_completion_prompt_is_refused(prompt: Any) -> None:
    assert refusal(openai.parse_completion, {"prompt": prompt}).param == "prompt"


def test_an_unknown_name_is_shown_short_and_plain() -> None:
    error = refusal(sagemaker.parse, {"inputs": "a", "ü" * 500: 1})
    assert error.message.isascii()
    assert len(error.message) < 600


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*sagemaker.PARAMETERS, *openai.CHAT, *openai.COMPLETION, "inputs", "parameters"])
parameters = st.dictionaries(names, json_values, max_size=4)
bodies = st.builds(
    lambda top, inner: {**top, "parameters": inner} if inner else top, parameters, st.none() | json_values | parameters
)


@settings(max_examples=500, deadline=None)
@given(body=bodies, number=st.integers(0, 2))
def test_no_body_does_worse_than_a_refusal(body: dict[str, Any], number: int) -> None:
    try:
        call = PARSERS[number](body)
    except RequestError as error:
        assert 400 <= error.status < 500
    else:
        assert call.prompts


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60) | st.text(max_size=60))
def test_no_bytes_do_worse_than_a_refusal(data: bytes | str) -> None:
    try:
        assert isinstance(parse_object(data), dict)
    except RequestError as error:
        assert error.status == 400
