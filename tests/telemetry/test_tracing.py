"""Traces: which spans a record gives, and that a collector gets them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvreuse.config import Config
from kvreuse.errors import ConfigError
from kvreuse.telemetry.observing import make_request_log
from kvreuse.telemetry.tracing import Tracer, spans

RECORD: dict[str, Any] = {
    "event": "request", "time": 100.0, "request_id": "r1", "status": 200, "duration_ms": 1000.0, "queue_ms": 200.0,
    "lookup_ms": 50.0, "ttft_ms": 600.0, "cached_tokens": 32, "miss_reason": None, "finish_reasons": ["eos"],
}  # fmt: skip


def in_ms(record: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Milliseconds after 99 s."""
    return {name: (round(a / 1e6) - 99_000, round(b / 1e6) - 99_000) for name, (a, b) in spans(record).items()}


def test_the_spans_follow_each_other_from_arrival_to_the_last_token() -> None:
    assert in_ms(RECORD) == {
        "request": (0, 1000),
        "queue": (0, 150),
        "match": (150, 200),
        "prefill": (200, 600),
        "decode": (600, 1000),
    }


def test_a_request_that_failed_before_it_was_timed_is_one_span() -> None:
    assert spans({"time": 99.0, "status": 400}) == {"request": (99 * 10**9, 99 * 10**9)}


def test_times_that_disagree_never_give_a_span_that_ends_before_it_begins() -> None:
    record = {**RECORD, "lookup_ms": 900.0, "ttft_ms": 5000.0}
    assert all(begin <= end for begin, end in spans(record).values())


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()


def test_a_collector_gets_the_spans_of_a_request_as_one_trace(collector: tuple[str, list[bytes]]) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    url, bodies = collector
    tracer = Tracer(url, resource={"EndpointName": "shop"})
    tracer(RECORD)
    tracer.close()
    request = service.ExportTraceServiceRequest.FromString(b"".join(bodies))
    (resource,) = request.resource_spans
    assert {(a.key, a.value.string_value) for a in resource.resource.attributes} >= {("EndpointName", "shop")}
    found = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    root = found.pop("request")
    assert set(found) == {"queue", "match", "prefill", "decode"}
    assert {span.parent_span_id for span in found.values()} == {root.span_id}
    assert {span.trace_id for span in found.values()} == {root.trace_id}
    attributes = {a.key: a.value for a in root.attributes}
    assert attributes["kvreuse.cached_tokens"].int_value == 32
    assert attributes["kvreuse.request_id"].string_value == "r1"


def test_without_the_extra_the_start_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="hint: pip install 'kvreuse\\[otel\\]'"):
        make_request_log(Config(otel_endpoint="http://127.0.0.1:9/v1/traces"))


def test_off_by_default() -> None:
    assert make_request_log(Config())._on_record is None
