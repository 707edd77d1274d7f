"""Every fault has its status and a body that says what to mend; none has a traceback or a prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fakes import FakeEngine
from server.conftest import MakeSite, Site

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff{}", 400, "not valid UTF-8"),
        (b"[1]", 400, "must be a JSON object, got an array"),
        (b'{"inputs": NaN}', 400, "NaN is not allowed"),
        (b"[" * 100_000, 400, "nesting"),
        (b'{"inputs": ' + b"9" * 5_000 + b"}", 400, "number is too long"),
        (b"{}", 400, "exactly one of messages, prompt, inputs, template"),
        (b'{"inputs": "a", "prompt": "b"}', 400, "exactly one of"),
        (b'{"inputs": 5}', 400, "inputs must be a string or an array"),
        (b'{"inputs": []}', 400, "inputs must be a string or an array"),
        (b'{"inputs": ""}', 400, "empty"),
        (b'{"inputs": "\\ud800"}', 400, "half a surrogate pair"),
        (b'{"inputs": "a", "parameters": {"max_new_token": 1}}', 400, "did you mean 'max_new_tokens'?"),
        (b'{"inputs": "a", "parametres": {}}', 400, "did you mean 'parameters'?"),
        (b'{"inputs": "a", "parameters": {"top_p": 1.5}}', 400, "a number above 0 up to 1, got 1.5"),
        (b'{"inputs": "a", "parameters": {"top_k": true}}', 400, "an integer from 0"),
        (b'{"inputs": "a", "parameters": {"num_beams": 4}}', 400, "num_beams must be 1"),
        (b'{"messages": []}', 400, "messages must be a non-empty array"),
        (b'{"messages": [{"role": "cook", "content": "a"}]}', 400, "messages[0].role must be one of"),
    ],
)
def test_a_bad_body_is_refused_by_name(client: httpx.Client, content: bytes, status: int, says: str) -> None:
    response = client.post("/invocations", content=content, headers=JSON)
    assert response.status_code == status
    error = response.json()["error"]
    assert says in error["message"]
    assert set(error) == {"type", "message", "param", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-npy", "application/x-www-form-urlencoded"])
def test_another_content_type_is_415(client: httpx.Client, path: str, kind: str) -> None:
    assert client.post(path, content=b"\x93NUMPY", headers={"content-type": kind}).status_code == 415


def test_a_body_without_a_content_type_is_taken_as_json(client: httpx.Client) -> None:
    assert client.post("/invocations", content=b'{"inputs": "a"}').status_code == 200


def test_too_large_a_body_is_413_declared_or_not(make_site: MakeSite) -> None:
    site = make_site(max_body_bytes=1024)
    parts = [b" " * 600] * 3
    assert httpx.post(f"{site.url}/invocations", content=b"".join(parts), headers=JSON).status_code == 413
    assert httpx.post(f"{site.url}/invocations", content=iter(parts), headers=JSON).status_code == 413


def test_a_body_that_never_arrives_is_408(make_site: MakeSite) -> None:
    site = make_site(request_timeout_s=0.1)
    with httpx.stream("POST", f"{site.url}/invocations", headers=JSON, content=slow_parts()) as response:
        assert response.status_code == 408


def slow_parts() -> Any:
    import time

    yield b"{"
    time.sleep(0.4)
    yield b"}"


def test_too_long_a_prompt_is_422_with_both_lengths(client: httpx.Client) -> None:
    response = client.post("/invocations", json={"inputs": "x" * 20_001, "parameters": {"max_new_tokens": 1}})
    assert response.status_code == 422
    assert "20002" in response.json()["error"]["message"]
    assert "20000" in response.json()["error"]["message"]


def test_a_full_queue_is_503_at_once_with_retry_after(make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(max_outstanding=0))
    response = httpx.post(f"{site.url}/invocations", json={"inputs": "a"})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "overloaded"


def test_a_failed_step_is_500_and_the_next_request_is_served(client: httpx.Client, site: Site) -> None:
    site.engine.crash_step()
    assert client.post("/invocations", json={"inputs": "a"}).status_code == 500
    assert client.post("/invocations", json={"inputs": "a"}).status_code == 200


def test_a_dead_engine_shows_in_ping_and_in_every_answer(client: httpx.Client, site: Site) -> None:
    assert client.get("/ping").status_code == 200
    site.engine.die()
    assert client.get("/ping").status_code == 503
    response = client.post("/invocations", json={"inputs": "a"})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "engine_dead")


def test_while_loading_ping_is_503_and_callers_are_told_to_retry(make_site: MakeSite) -> None:
    site = make_site(is_loaded=False)
    assert httpx.get(f"{site.url}/ping").status_code == 503
    response = httpx.post(f"{site.url}/v1/chat/completions", json={})
    assert (response.status_code, "retry-after" in response.headers) == (503, True)
    site.load()
    assert httpx.get(f"{site.url}/ping").status_code == 200


def test_ping_answers_while_the_engine_stalls(client: httpx.Client, site: Site) -> None:
    site.engine.stall()
    with client.stream("GET", "/ping") as response:
        assert response.status_code == 200


def test_unknown_routes_and_methods_say_what_there_is(client: httpx.Client) -> None:
    for response, status in ((client.get("/nowhere"), 404), (client.get("/invocations"), 405)):
        assert response.status_code == status
        assert "POST /invocations" in response.json()["error"]["message"]


def test_openai_routes_use_openais_error_object(client: httpx.Client) -> None:
    error = client.post("/v1/chat/completions", json={"messages": [], "n": 1}).json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "messages", 400)


def test_a_fault_of_ours_says_nothing_of_itself(
    client: httpx.Client, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("SEC" + "RET prompt")  # the log may show this line, but not what it says

    monkeypatch.setattr(site.service, "answer", broken)
    response = client.post("/invocations", json={"inputs": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"
    assert "RuntimeError" in caplog.text
    assert "SECRET" not in caplog.text + json.dumps(response.json())
