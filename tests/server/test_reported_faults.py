"""Faults that users of other servers reported, each by its number in the list of cases. (22 and 23: test_tenants.)"""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, expected_text
from server.conftest import MakeSite, Site
from server.test_streams import events, wait_for

SECRET = "zyxwvuts"
HF: dict[str, Any] = {"inputs": "hello world", "parameters": {"max_new_tokens": 3, "details": True}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 3}
TEXT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 3}


def post(client: httpx.Client, body: Any, path: str = "/invocations") -> httpx.Response:
    return client.post(path, json=body)


def test_case_25_no_log_metric_or_status_route_holds_a_callers_text(
    make_site: MakeSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tenant_mode="header", tenant_secret="key")
    odd: list[Any] = [
        {"inputs": SECRET},
        {"inputs": [SECRET, 1]},
        {"inputs": SECRET, "stream": True},
        {"inputs": SECRET, "parameters": {SECRET: SECRET}},
        {"prefix": SECRET, "inputs": SECRET, "parameters": {"stop": SECRET}},
        {"template": SECRET, "variables": {SECRET: SECRET}},
        {"messages": [{"role": SECRET, "content": SECRET}]},
        {"prompt": SECRET, "max_tokens": 2, "model": SECRET, "user": SECRET},
        {SECRET: SECRET},
        SECRET,
    ]
    headers = {"X-KVReuse-Tenant": SECRET, "X-Amzn-SageMaker-Inference-Id": SECRET}
    with httpx.Client(base_url=site.url, headers=headers, timeout=20) as client:
        statuses = {post(client, body).status_code for body in odd}
        client.post("/invocations", content=SECRET.encode())
        client.get(f"/{SECRET}")
        site.engine.stall()
        site.engine.crash_step()
        post(client, {"inputs": SECRET})
        shown = "".join(client.get(path).text for path in ("/metrics", "/ping", "/execution-parameters", "/v1/models"))
    assert statuses == {200, 400}
    captured = capfd.readouterr()
    assert SECRET not in site.log.getvalue() + shown + captured.out + captured.err


@pytest.mark.parametrize(
    ("path", "body"), [("/invocations", HF), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
@pytest.mark.parametrize("n", [1, 3])
def test_case_27_cached_tokens_is_an_int_cold_and_warm_whole_and_for_each_n(
    client: httpx.Client, path: str, body: dict[str, Any], n: int
) -> None:
    sent = {**body, "n": n} if "parameters" not in body else {**body, "parameters": {**body["parameters"], "n": n}}
    found: list[list[Any]] = []
    for _ in range(2):
        value = post(client, sent, path).json()
        usages = [item["details"]["usage"] for item in value] if isinstance(value, list) else [value["usage"]]
        found.append([usage["prompt_tokens_details"]["cached_tokens"] for usage in usages])
    num_said = n if body is HF else 1
    assert found[0] == [0] * num_said
    assert all(type(cached) is int and cached > 0 for cached in found[1])
    assert len(set(found[1])) == 1


@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_case_27_the_last_chunk_of_a_stream_says_it_too(
    client: httpx.Client, path: str, body: dict[str, Any], includes_usage: bool
) -> None:
    sent = {**body, "stream": True, "stream_options": {"include_usage": includes_usage}}
    said = [events(post(client, sent, path).text)[-1]["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert said[0] == {"cached_tokens": 0}
    assert type(said[1]["cached_tokens"]) is int
    assert said[1]["cached_tokens"] > 0


def test_case_39_n_inputs_give_n_answers_in_order_and_a_bad_one_fails_alone(client: httpx.Client) -> None:
    inputs: list[Any] = ["one", 2, "three", "x" * 30_000, "", "six"]
    answers = post(client, {"inputs": inputs, "parameters": {"max_new_tokens": 3}}).json()
    assert [answer.get("generated_text") for answer in answers] == [
        expected_text(text, 3) if text in ("one", "three", "six") else None for text in inputs
    ]
    assert [answer["error"]["param"] for answer in answers if "error" in answer] == ["inputs[1]", "inputs", "inputs"]


def test_case_42_ping_fails_as_soon_as_the_engine_is_dead(client: httpx.Client, site: Site) -> None:
    assert client.get("/ping").status_code == 200
    site.engine.die()
    assert client.get("/ping").status_code == 503
    assert post(client, HF).status_code == 503


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's size from /proc")
def test_case_43_memory_does_not_grow_with_requests(client: httpx.Client, site: Site) -> None:
    def send(count: int) -> None:
        for number in range(count):
            body = {**HF, "stream": number % 2 == 0}
            headers = {"X-Amzn-SageMaker-Inference-Id": f"{number}"}
            assert client.post("/invocations", json=body, headers=headers).status_code == 200
        site.engine.submitted.clear()
        site.engine.purge()
        site.log.truncate(0)

    send(300)
    before = resident_bytes()
    send(1000)
    assert resident_bytes() - before < 8 * 2**20


def test_case_44_a_prompt_that_is_too_long_is_refused_at_once(client: httpx.Client, site: Site) -> None:
    site.engine.stall()
    response = post(client, {"inputs": "x" * 30_000, "parameters": {"max_new_tokens": 5}})
    assert response.status_code == 422
    assert site.engine.submitted == []


def test_case_44_a_stream_that_ran_out_of_time_frees_its_place(make_site: MakeSite) -> None:
    engine = FakeEngine(max_outstanding=1, step_s=0.05)
    site = make_site(engine=engine, stream_timeout_s=0.3)
    with httpx.Client(base_url=site.url, timeout=20) as client:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 10_000}, "stream": True}
        with client.stream("POST", "/invocations", json=body) as response, pytest.raises(httpx.RemoteProtocolError):
            response.read()
        wait_for(lambda: site.engine.num_outstanding == 0)
        assert post(client, {"inputs": "next", "parameters": {"max_new_tokens": 2}}).json() == [
            {"generated_text": expected_text("next", 2)}
        ]


def test_case_44_the_next_caller_is_served_after_an_answer_ran_out_of_time(make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(max_outstanding=1), request_timeout_s=0.3)
    site.engine.stall()
    with httpx.Client(base_url=site.url, timeout=20) as client:
        late = post(client, HF)
        site.engine.gate.set()
        assert json.loads(late.content)["error"]["type"] == "deadline_exceeded"
        wait_for(lambda: site.engine.num_outstanding == 0)
        assert post(client, HF).status_code == 200
