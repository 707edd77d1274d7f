"""Sends metrics to CloudWatch within its limits, keeps what could not be sent for a while, counts what was lost.

Knows PutMetricData. Knows nothing of what the metrics mean; runs on the publisher's thread only.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import boto3
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from kvreuse.telemetry.publisher import Datum

__all__ = ["CloudWatch", "connect", "requests"]

MAX_METRICS, MAX_VALUES, MAX_BYTES = 1000, 150, 900_000  # the service takes 1 MB, counted in an encoding of its own
MAX_QUEUED = 15  # requests kept while CloudWatch does not answer: a quarter of an hour by default
_LOG = logging.getLogger(__name__)


def connect() -> Any:
    """A client that gives up soon: the next window brings the next chance."""
    config = ClientConfig(connect_timeout=2, read_timeout=3, retries={"total_max_attempts": 1})
    return boto3.client("cloudwatch", config=config)


def requests(
    data: Sequence[Datum], at: float, *, namespace: str, dimensions: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The arguments of put_metric_data for these metrics, each within every limit of one request."""
    named = [{"Name": name, "Value": value} for name, value in dimensions.items()]
    common = {"Dimensions": named, "Timestamp": datetime.fromtimestamp(at, UTC)}
    batch: list[dict[str, Any]] = []
    num_bytes = 0
    for datum in data:
        finite = [(value, count) for value, count in datum.values.items() if math.isfinite(value)]
        for first in range(0, len(finite), MAX_VALUES):
            values, counts = zip(*finite[first : first + MAX_VALUES], strict=True)
            metric = {"MetricName": datum.name, "Unit": datum.unit, "Values": values, "Counts": counts, **common}
            size = len(json.dumps(metric, default=str))
            if batch and (len(batch) == MAX_METRICS or num_bytes + size > MAX_BYTES):
                yield {"Namespace": namespace, "MetricData": batch}
                batch, num_bytes = [], 0
            batch.append(metric)
            num_bytes += size
    if batch:
        yield {"Namespace": namespace, "MetricData": batch}


class CloudWatch:
    """A sink. `on_drop` is told how many metrics were lost: the queue was full, or they can never be accepted."""

    def __init__(
        self,
        *,
        namespace: str,
        dimensions: Mapping[str, str],
        on_drop: Callable[[int], None],
        connect: Callable[[], Any] = connect,
    ) -> None:
        self._namespace = namespace
        self._dimensions = dimensions
        self._on_drop = on_drop
        self._connect = connect
        self._client: Any = None
        self._is_failing = False
        self.queue: deque[dict[str, Any]] = deque()

    def __call__(self, data: Sequence[Datum], at: float) -> None:
        """Queue these, the oldest make room; then send as much of the queue as is taken."""
        for request in requests(data, at, namespace=self._namespace, dimensions=self._dimensions):
            if len(self.queue) == MAX_QUEUED:
                self._on_drop(len(self.queue.popleft()["MetricData"]))
            self.queue.append(request)
        while self.queue and self._send(self.queue[0]):
            self.queue.popleft()

    def _send(self, request: dict[str, Any]) -> bool:
        """Whether it is done with: taken, or refused for good."""
        try:
            self._client = self._client or self._connect()
            self._client.put_metric_data(**request)
        except (BotoCoreError, ClientError) as error:
            if not self._is_failing:  # once per outage
                _LOG.warning("CloudWatch takes no metrics, will try again: %s", error)
            self._is_failing = True
            is_refused = _is_refused(error)
            if is_refused:
                self._on_drop(len(request["MetricData"]))
            return is_refused
        self._is_failing = False
        return True


def _is_refused(error: Exception) -> bool:
    """Is it this request that is wrong, so that sending it again is in vain?"""
    if isinstance(error, ClientError):
        code = error.response.get("Error", {}).get("Code", "")
        return code.startswith(("Invalid", "Missing", "Validation", "RequestEntityTooLarge")) and "Token" not in code
    return isinstance(error, ParamValidationError)
