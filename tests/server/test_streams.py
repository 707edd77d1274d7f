"""Server-sent events: whole lines, a terminal event, the facts in it, and a broken connection after a fault."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, expected_text
from server.conftest import MakeSite, Site


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def wait_for(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


def raw_post(url: str, body: dict[str, Any], *headers: str) -> socket.socket:
    """A request whose connection is ours to read from or to close."""
    address = httpx.URL(url)
    sock = socket.create_connection((address.host, address.port or 80), timeout=10)
    content = json.dumps(body).encode()
    lines = ["POST /invocations HTTP/1.1", "host: x", f"content-length: {len(content)}", *headers, "", ""]
    sock.sendall("\r\n".join(lines).encode() + content)
    return sock


def test_the_pieces_of_a_stream_add_up_to_the_answer(client: httpx.Client) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 6}, "stream": True}
    response = client.post("/invocations", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = events(response.text)
    assert "".join(part["token"]["text"] for part in parts) == expected_text("hello", 6)
    assert parts[-1]["generated_text"] == expected_text("hello", 6)
    assert response.text.endswith("}\n\n")


def test_the_last_event_carries_facts_and_usage(client: httpx.Client) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 6, "stream": True}}
    details = events(client.post("/invocations", json=body).text)[-1]["details"]
    assert details["usage"]["completion_tokens"] == 6
    assert details["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert details["kv_cache"]["miss_reason"] == "cold"


@pytest.mark.parametrize("header", ["accept", "x-amzn-sagemaker-accept"])
def test_an_accept_header_asks_for_a_stream_too(client: httpx.Client, header: str) -> None:
    response = client.post("/invocations", json={"inputs": "hello"}, headers={header: "text/event-stream"})
    assert response.headers["content-type"].startswith("text/event-stream")


def test_events_leave_as_they_come_and_in_whole_lines(client: httpx.Client, site: Site) -> None:
    site.engine.step_s = 0.02
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 20}, "stream": True}
    with client.stream("POST", "/invocations", json=body) as response:
        chunks = []
        for chunk in response.iter_raw():
            chunks.append(chunk)
            if len(chunks) == 1:
                assert site.engine.num_outstanding == 1
    assert len(chunks) > 5
    assert all(chunk.endswith(b"\n\n") for chunk in chunks)


def test_a_fault_before_the_first_event_is_a_status(client: httpx.Client, site: Site) -> None:
    body = {"inputs": "x" * 30_000, "parameters": {"max_new_tokens": 6}, "stream": True}
    assert client.post("/invocations", json=body).status_code == 422


def test_a_stream_of_several_prompts_has_no_place_for_a_refused_one(client: httpx.Client, site: Site) -> None:
    site.engine.step_s = 0.02
    body = {"prompt": ["a", "x" * 30_000], "max_tokens": 500, "stream": True}
    assert client.post("/v1/completions", json=body).status_code == 422
    wait_for(lambda: site.engine.num_outstanding == 0)


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions"])
def test_a_fault_in_the_middle_is_an_error_event_and_a_broken_stream(
    client: httpx.Client, site: Site, path: str
) -> None:
    site.engine.step_s = 0.01
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5_000, "stream": True}
    seen = b""
    with client.stream("POST", path, json=body) as response, pytest.raises(httpx.RemoteProtocolError):
        for chunk in response.iter_raw():
            if not seen:
                site.engine.crash_step()
            seen += chunk
    last = seen.decode().strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["type"] == "internal_error"
    assert b"[DONE]" not in seen


def test_a_caller_that_leaves_a_stream_is_aborted(site: Site) -> None:
    site.engine.step_s = 0.01
    with raw_post(site.url, {"inputs": "hello", "parameters": {"max_new_tokens": 9_000}, "stream": True}) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    wait_for(lambda: site.engine.num_outstanding == 0)
    assert site.engine.aborted == [site.engine.submitted[0].request_id]


def test_a_caller_that_leaves_before_the_answer_is_aborted(site: Site) -> None:
    site.engine.stall()
    for stream in (False, True):
        with raw_post(site.url, {"inputs": "hello", "parameters": {"max_new_tokens": 9}, "stream": stream}):
            wait_for(lambda: site.engine.num_outstanding == 1)
        wait_for(lambda: site.engine.num_outstanding == 0)
    assert len(site.engine.aborted) == 2


def test_a_late_answer_is_504_and_frees_its_place(make_site: MakeSite) -> None:
    site = make_site(request_timeout_s=0.1, stream_timeout_s=0.1)
    site.engine.stall()
    for stream in (False, True):
        response = httpx.post(f"{site.url}/invocations", json={"inputs": "hello", "stream": stream})
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "deadline_exceeded"
    wait_for(lambda: site.engine.num_outstanding == 0)
    site.engine.gate.set()
    assert httpx.post(f"{site.url}/invocations", json={"inputs": "hello"}).status_code == 200


def test_a_late_stream_breaks_with_an_error_event(make_site: MakeSite) -> None:
    site = make_site(engine=FakeEngine(step_s=0.02), stream_timeout_s=0.2)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 9_000}, "stream": True}
    seen = b""
    with (
        httpx.stream("POST", f"{site.url}/invocations", json=body) as response,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for chunk in response.iter_raw():
            seen += chunk
    assert b"deadline_exceeded" in seen
    wait_for(lambda: site.engine.num_outstanding == 0)


def test_a_stream_carries_one_answer_only(client: httpx.Client) -> None:
    for body in ({"inputs": ["a", "b"]}, {"inputs": "a", "parameters": {"n": 2}}):
        response = client.post("/invocations", json={**body, "stream": True})
        assert response.status_code == 400


def test_a_caller_that_left_is_logged_and_counted(site: Site) -> None:
    site.engine.stall()
    with raw_post(site.url, {"inputs": "hello"}):
        wait_for(lambda: site.engine.num_outstanding == 1)
    wait_for(site.log_lines)
    assert [(line["status"], line["error"]) for line in site.log_lines()] == [(499, "disconnected")]
    assert site.stats.snapshot().counters["failures", ("disconnected",)] == 1


def test_half_an_answer_never_looks_whole(client: httpx.Client, site: Site) -> None:
    site.engine.step_s = 0.01
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 5_000}}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/invocations", json=body)
        wait_for(lambda: site.engine.submitted)
        site.engine.abort(site.engine.submitted[0].request_id)
        assert answer.result().status_code == 503


def test_a_fast_stream_lets_the_loop_see_that_its_caller_left(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        with raw_post(site.url, {"inputs": "a", "parameters": {"max_new_tokens": 15_000}, "stream": True}) as sock:
            sock.recv(100)
        wait_for(lambda: site.engine.num_outstanding == 0)
    assert "socket.send() raised exception" not in caplog.text
    assert site.engine.aborted


def test_a_fast_stream_leaves_the_loop_to_others(site: Site, client: httpx.Client) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 15_000}, "stream": True}
    with client.stream("POST", "/invocations", json=body) as response:
        num_writes = sum(1 for _ in response.iter_raw(chunk_size=None))
    assert num_writes < 15_000
