"""Writes metrics as one line in CloudWatch's embedded metric format, where logs are collected but no API is reached.

Knows the format. Knows nothing of what the metrics mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from kvreuse.telemetry.publisher import Datum
from kvreuse.telemetry.window import Values

__all__ = ["emf_record"]

MAX_VALUES = 100  # the format's limit for one metric of a line


def emf_record(data: Sequence[Datum], at: float, *, namespace: str, dimensions: Mapping[str, str]) -> dict[str, object]:
    """The line as an object. More than 100 values of a metric are thinned to as many quantiles."""
    metrics = [{"Name": datum.name, "Unit": datum.unit} for datum in data]
    directive = {"Namespace": namespace, "Dimensions": [list(dimensions)], "Metrics": metrics}
    return {
        "_aws": {"Timestamp": int(at * 1000), "CloudWatchMetrics": [directive]},
        **dimensions,
        **{datum.name: _expanded(datum.values) for datum in data},
    }


def _expanded(values: Values) -> list[float]:
    """Every value as often as it was seen, at most MAX_VALUES in all."""
    ordered = sorted(values.items())
    ends = list(accumulate(count for _, count in ordered))
    total, num_kept = ends[-1], min(ends[-1], MAX_VALUES)
    out: list[float] = []
    for (value, _), end in zip(ordered, ends, strict=True):
        out += [value] * (round(end * num_kept / total) - len(out))
    return out
