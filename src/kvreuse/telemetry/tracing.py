"""One trace per request from its log record: queue, match, prefill, decode. Needs the extra `otel`; off by default.

Knows times of records. Knows nothing of how they were taken; the exporter's own thread sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvreuse.errors import ConfigError

__all__ = ["Tracer", "spans"]

_EXPORT_TIMEOUT_S = 1  # four batches may wait at the end, with SIGKILL to come
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


class Tracer:
    """Takes the log record of each request. What is not sent yet at the end of the process is sent then, or by `close`.

    Raises ConfigError when OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, *, resource: Mapping[str, str]) -> None:
        try:
            from opentelemetry import trace
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
        self.close = provider.shutdown
        self._tracer = provider.get_tracer("kvreuse")
        self._inside = trace.set_span_in_context

    def __call__(self, record: Mapping[str, Any]) -> None:
        times = spans(record)
        begin, end = times.pop("request")
        facts = {f"kvreuse.{name}": value for name, value in record.items() if value is not None and name not in _TIMES}
        root = self._tracer.start_span("request", start_time=begin, attributes=facts)
        for name, (start, stop) in times.items():
            self._tracer.start_span(name, context=self._inside(root), start_time=start).end(stop)
        root.end(end)
