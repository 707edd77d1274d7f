"""One trace per request from its log record: queue, match, prefill, decode. Needs the extra `otel`; off by default.

Knows times of records. Knows nothing of how they were taken; the exporter's own thread sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvreuse.errors import ConfigError

__all__ = ["make_tracer", "spans"]

_EXPORT_TIMEOUT_S = 3
_TIMES = {"time", "event"}


def spans(record: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Name -> (begin, end) in Unix nanoseconds. A request that failed before it was timed has `request` alone.

    [ queue ........ [ match )[ prefill ......... )[ decode ......... )
    arrival                   admission            first token        end
    """
    end = record["time"]
    begin = end - record.get("duration_ms", 0) / 1000
    found = {"request": (begin, end)}
    if "ttft_ms" in record:
        admitted = begin + record["queue_ms"] / 1000
        matching = max(begin, admitted - record["lookup_ms"] / 1000)
        first_token = max(admitted, min(end, begin + record["ttft_ms"] / 1000))
        found |= {"queue": (begin, matching), "match": (matching, admitted)}
        found |= {"prefill": (admitted, first_token), "decode": (first_token, end)}
    return {name: (int(a * 1e9), int(b * 1e9)) for name, (a, b) in found.items()}


def make_tracer(endpoint: str, *, resource: Mapping[str, str]) -> Callable[[Mapping[str, Any]], None]:
    """What takes the log record of each request. Raises ConfigError when OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "option.otel_endpoint needs OpenTelemetry, which is not installed\nhint: pip install 'kvreuse[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "kvreuse", **resource}))
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return lambda record: _trace(provider.get_tracer("kvreuse"), record)


def _trace(tracer: Any, record: Mapping[str, Any]) -> None:
    from opentelemetry.trace import set_span_in_context

    times = spans(record)
    begin, end = times.pop("request")
    facts = {f"kvreuse.{name}": value for name, value in record.items() if value is not None and name not in _TIMES}
    root = tracer.start_span("request", start_time=begin, attributes=facts)
    inside = set_span_in_context(root)
    for name, (start, stop) in times.items():
        tracer.start_span(name, context=inside, start_time=start).end(stop)
    root.end(end)
