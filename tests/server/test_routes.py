"""The routes that are not a request for text."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import httpx
from prometheus_client.parser import text_string_to_metric_families
from server.conftest import MakeSite, Site


def metrics(client: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(response.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_metrics_count_what_was_answered(client: httpx.Client) -> None:
    client.post("/invocations", json={"inputs": ["one", "two"], "parameters": {"max_new_tokens": 5}})
    client.post("/invocations", json={"inputs": 5})
    found = metrics(client)
    assert found["kvreuse_requests_total", (("finish_reason", "length"),)] == 2
    assert found["kvreuse_generated_tokens_total", ()] == 10
    assert found["kvreuse_failures_total", (("type", "invalid_request_error"),)] == 1
    assert found["kvreuse_http_responses_total", (("route", "/invocations"), ("status", "400"))] == 1


def test_metrics_show_the_engine_alive_and_dead(client: httpx.Client, site: Site) -> None:
    assert metrics(client)["kvreuse_up", ()] == 1
    site.engine.die()
    assert metrics(client)["kvreuse_up", ()] == 0


def test_metrics_answer_while_loading(make_site: MakeSite) -> None:
    site = make_site(is_loaded=False)
    with httpx.Client(base_url=site.url) as client:
        assert metrics(client)["kvreuse_up", ()] == 0


def test_unknown_paths_do_not_become_labels(client: httpx.Client) -> None:
    client.get("/SECRET")
    assert "SECRET" not in client.get("/metrics").text


def test_batch_transform_is_told_the_limits(make_site: MakeSite) -> None:
    site = make_site(max_concurrency=12)
    assert httpx.get(f"{site.url}/execution-parameters").json() == {
        "MaxConcurrentTransforms": 12,
        "BatchStrategy": "SINGLE_RECORD",
        "MaxPayloadInMB": 25,
    }


def test_idle_and_half_sent_connections_do_not_stop_ping(site: Site, client: httpx.Client) -> None:
    address = httpx.URL(site.url)
    halves = [
        b"",
        b"POST /invocations HTTP/1.1\r\nhos",
        b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
    ]
    with ExitStack() as stack:
        for number in range(150):
            sock = stack.enter_context(socket.create_connection((address.host, address.port or 80)))
            sock.sendall(halves[number % 3])
        assert client.get("/ping").status_code == 200
        assert client.post("/invocations", json={"inputs": "a"}).status_code == 200
