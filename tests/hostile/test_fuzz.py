"""Fuzzed bodies against the running container: refused or answered, never a fault, and nobody's text is repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import Container

from tests.hostile.bodies import SECRET, body

CANARY = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 6}}
NUM_BODIES = 200


@pytest.fixture(scope="module")
def answers(container: Container) -> list[tuple[int, httpx.Response]]:
    """(seed, answer) of every fuzzed body, a few at a time, with a canary before and after."""
    before = container.post(CANARY).json()
    with httpx.Client(base_url=container.url, timeout=60) as client, ThreadPoolExecutor(12) as pool:

        def ask(seed: int) -> tuple[int, httpx.Response]:
            route, data = body(seed)
            return seed, client.post(route, content=data, headers={"Content-Type": "application/json"})

        found = list(pool.map(ask, range(NUM_BODIES)))
    container.wait_until_idle()
    assert container.post(CANARY).json() == before
    return found


def refused(answers: list[tuple[int, httpx.Response]]) -> Iterator[tuple[int, httpx.Response]]:
    return ((seed, answer) for seed, answer in answers if answer.status_code != 200)


def test_no_body_is_a_fault_of_the_server(answers: list[tuple[int, httpx.Response]]) -> None:
    odd = [(seed, answer.status_code) for seed, answer in answers if answer.status_code not in (200, 400, 422)]
    assert odd == []


def test_the_fuzz_meets_both_sides_of_the_rules(answers: list[tuple[int, httpx.Response]]) -> None:
    num_refused = sum(1 for _ in refused(answers))
    assert NUM_BODIES // 5 < num_refused < NUM_BODIES * 4 // 5


def test_every_refusal_is_an_error_object_without_a_traceback(answers: list[tuple[int, httpx.Response]]) -> None:
    for _, answer in refused(answers):
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert error["request_id"] == answer.headers["x-request-id"]
        assert "Traceback" not in answer.text


def test_no_refusal_repeats_a_prompt(answers: list[tuple[int, httpx.Response]]) -> None:
    said = [
        (seed, answer.json()["error"]["message"])
        for seed, answer in refused(answers)
        if SECRET in answer.text and "unknown parameter" not in answer.text
    ]
    assert said == []


def test_every_answer_is_json_that_anybody_can_read(answers: list[tuple[int, httpx.Response]]) -> None:
    for _, answer in answers:
        if answer.headers["content-type"] == "application/json":
            json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_every_stream_ends_with_its_last_event(answers: list[tuple[int, httpx.Response]]) -> None:
    streams = [answer.text for _, answer in answers if answer.headers["content-type"].startswith("text/event-stream")]
    assert streams
    assert all(text.endswith("\n\n") and ("[DONE]" in text or '"details":{' in text) for text in streams)


def test_neither_log_holds_a_prompt_or_a_traceback(
    answers: list[tuple[int, httpx.Response]], container: Container
) -> None:
    said = container.said()
    assert "kvreuse.server.lifecycle: ready" in said
    assert SECRET not in said
    assert "Traceback" not in said
    assert [line for line in container.log_lines() if line["status"] >= 500] == []
