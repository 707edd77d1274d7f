"""Answers that must be JSON: whatever is sampled meets the schema, cold and warm, alone and in a batch."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kvreuse.engine.engine import Engine
from kvreuse.errors import RequestError
from kvreuse.types import Done, FinishReason, Request, SamplingParams
from tests.engine.harness import Answer, demo, running_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["mood", "score", "tags"],
    "additionalProperties": False,
}
PROMPT = "Here is a weather report with a mood and a score as a poem, not as JSON. Once upon a time"


def ask(engine: Engine, name: str, *, schema: Any = SCHEMA, **sampling: Any) -> Answer:
    answer = Answer()
    request = Request(
        request_id=name,
        token_ids=engine.tokenizer.encode(PROMPT),
        sampling=SamplingParams(**{"max_new_tokens": 120, **sampling}),
        make_mask=None if schema is None else engine.grammars.compile(schema),
    )
    engine.submit(request, answer.events.put)
    return answer


def check(answer: Answer) -> None:
    done = answer.result()
    assert isinstance(done, Done), done
    for completion in done.completions:
        assert completion.finish_reason is FinishReason.EOS
        value = json.loads(completion.text)
        assert list(value) == ["mood", "score", "tags"]
        assert value["mood"] in ("good", "bad")
        assert 0 <= value["score"] <= 99
        assert all(len(tag) <= 6 for tag in value["tags"])


def test_an_answer_meets_its_schema_greedy_and_sampled_in_one_batch_with_free_text() -> None:
    with running_engine(demo()) as engine:
        free = ask(engine, "free", schema=None, max_new_tokens=8)
        bound = [
            ask(engine, "greedy"),
            ask(engine, "sampled", temperature=1.5, seed=1),
            ask(engine, "penalised", temperature=1.0, seed=2, repetition_penalty=1.3, n=3),
        ]
        for answer in bound:
            check(answer)
        alone = ask(engine, "alone", schema=None, max_new_tokens=8)
        assert free.tokens() == alone.tokens()


def test_a_preempted_answer_goes_on_where_its_grammar_was() -> None:
    bytes_per_token = 46_080  # 30 layers, 3 heads of 64, K and V, float32
    room = len(demo().tokenizer.encode(PROMPT)) + 90
    digits = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 16, "maxItems": 16}
    with running_engine(demo(), kv_cache_memory_bytes=room * bytes_per_token) as engine:
        answers = [ask(engine, f"r{i}", schema=digits, temperature=1.5, seed=i, max_new_tokens=80) for i in range(4)]
        for answer in answers:
            done = answer.result()
            assert isinstance(done, Done), done
            assert len(json.loads(done.completions[0].text)) == 16
        assert engine.snapshot()["preempted"] > 0


def test_a_mask_allows_only_the_end_once_the_answer_is_whole() -> None:
    loaded = demo()
    with running_engine(loaded) as engine:
        token_ids = [5, 6, 7]
        mask = engine.grammars.compile({"enum": [1]})(token_ids)
        assert not mask()[list(loaded.eos_token_ids)].any()
        token_ids += engine.tokenizer.encode("1", add_special_tokens=False)
        assert set(mask().nonzero()[:, 0].tolist()) == set(loaded.eos_token_ids)


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}, {"properties": 1}]
)
def test_a_schema_that_cannot_be_followed_is_the_callers_to_mend(schema: dict[str, Any]) -> None:
    with running_engine(demo()) as engine, pytest.raises(RequestError) as refusal:
        engine.grammars.compile(schema)
    assert refusal.value.param == "response_format"


def test_without_the_extra_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with running_engine(demo()) as engine, pytest.raises(RequestError, match=r"kvreuse\[grammar\]") as refusal:
        engine.grammars.compile(SCHEMA)
    assert refusal.value.status == 400
