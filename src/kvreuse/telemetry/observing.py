"""What a configuration asks to be published and traced, put together.

Knows the options. Knows nothing of when publishing starts and ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvreuse.config import Config
from kvreuse.telemetry.emf import emf_record
from kvreuse.telemetry.publisher import Publisher, Sink
from kvreuse.telemetry.request_log import RequestLog
from kvreuse.telemetry.stats import Stats
from kvreuse.telemetry.tracing import Tracer

__all__ = ["make_publisher", "make_request_log"]


def make_publisher(config: Config, stats: Stats, gauges: Callable[[], Mapping[str, float]]) -> Publisher:
    """The publisher, not started; one without sinks never does anything."""
    named: dict[str, Any] = {"namespace": config.cloudwatch_namespace, "dimensions": _dimensions(config)}
    sinks: list[Sink] = []
    if config.cloudwatch == "on":
        from kvreuse.telemetry.cloudwatch import CloudWatch

        sinks.append(CloudWatch(on_drop=stats.record_dropped, **named))
    if config.emf:
        log = RequestLog(sys.stdout)
        sinks.append(lambda data, at: log.write(emf_record(data, at, **named)))
    return Publisher(stats, gauges, sinks, interval_s=config.cloudwatch_interval_s)


def make_request_log(config: Config) -> RequestLog:
    """The log on stdout, with a trace of every record where a collector is named. Raises ConfigError."""
    endpoint = config.otel_endpoint
    tracer = None if endpoint is None else Tracer(endpoint, resource=_dimensions(config))
    return RequestLog(sys.stdout, on_record=tracer)


def _dimensions(config: Config) -> dict[str, str]:
    return {"EndpointName": config.endpoint_name, "VariantName": config.variant_name}
