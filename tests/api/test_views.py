"""Answers as values: what a view makes of completions, whole and in pieces."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from kvreuse.api.call import Meta, View
from kvreuse.api.views import OpenAIView, SageMakerView
from kvreuse.errors import KVReuseError, OverloadedError
from kvreuse.types import CacheFacts, Completion, Delta, Done, FinishReason, TokenLogprob

META = Meta(request_id="abc", model="m", created=1, token_text=lambda token_id: f"<{token_id}>")
LOGPROBS = (TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -math.inf), (7, math.nan))),)


def view(kind: str, **settings: Any) -> View:
    if kind == "hf":
        return SageMakerView(**{"has_details": True, **settings})
    return OpenAIView(is_chat=kind == "chat", **settings)


def done(text: str = "hi", *, reason: FinishReason = FinishReason.EOS, n: int = 1) -> Done:
    completions = tuple(
        Completion(index=i, text=f"{text}{i or ''}", token_ids=(5,), finish_reason=reason, logprobs=LOGPROBS)
        for i in range(n)
    )
    return Done(completions=completions, facts=CacheFacts(prompt_tokens=3))


def strict(value: object) -> Any:
    """What a strict JSON reader sees."""
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("kind", ["hf", "chat", "text"])
def test_impossible_tokens_do_not_break_json(kind: str) -> None:
    shown = view(kind)
    delta = Delta(index=0, text="hi", token_ids=(5,), logprobs=LOGPROBS)
    everything = [shown.answer([done()], META), *shown.delta(0, delta, META), *shown.last([done()], META)]
    assert "-9999.0" in json.dumps(strict(everything))


@pytest.mark.parametrize(
    ("reason", "hf", "openai"),
    [
        (FinishReason.LENGTH, "length", "length"),
        (FinishReason.EOS, "eos_token", "stop"),
        (FinishReason.STOP, "stop_sequence", "stop"),
    ],
)
def test_each_schema_has_its_own_word_for_the_end(reason: FinishReason, hf: str, openai: str) -> None:
    (answer,) = strict(view("hf").answer([done(reason=reason)], META))
    assert answer["details"]["finish_reason"] == hf
    assert strict(view("chat").answer([done(reason=reason)], META))["choices"][0]["finish_reason"] == openai


def test_a_list_with_several_answers_each_is_nested() -> None:
    shown = view("hf", is_list=True, has_details=False, n=2)
    full = OverloadedError("full")
    answers = strict(shown.answer([done("a", n=2), full], META))
    assert answers[0] == [{"generated_text": "a"}, {"generated_text": "a1"}]
    assert answers[1][0]["error"]["type"] == "overloaded"


def test_choices_cannot_hold_an_error_so_one_fails_the_call() -> None:
    with pytest.raises(KVReuseError, match="full"):
        view("text").answer([done(), OverloadedError("full")], META)


def test_text_held_back_by_the_detokenizer_makes_no_empty_chunk() -> None:
    assert list(view("chat").delta(0, Delta(index=0, text="", token_ids=(5,)), META)) == []
