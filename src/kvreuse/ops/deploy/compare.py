"""`kvreuse compare ENDPOINT`: what CloudWatch says of each variant, side by side.

Knows metric names and a table. Knows nothing of how they came to be published.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, NamedTuple

from kvreuse.config import OPTIONS
from kvreuse.ops.deploy.cloud import Cloud, DeployError
from kvreuse.ops.deploy.resources import Call, call, dimensions

__all__ = ["FIGURES", "add_parser", "figures", "query", "run", "table"]


class Figure(NamedTuple):
    """One row. `shown` is a format; namespace None is the one of our metrics."""

    title: str
    metric: str
    statistic: str
    shown: str
    namespace: str | None = None


FIGURES = {
    "invocations": Figure("Calls", "Invocations", "Sum", "{:,.0f}", "AWS/SageMaker"),
    "hit_rate": Figure("Hit rate", "KV_CACHE_HIT_RATE", "Average", "{:.1%}"),
    "memory_usage": Figure("KV memory in use", "KV_MEMORY_USAGE", "Average", "{:.1%}"),
    "eviction_rate": Figure("Evictions (blocks/s)", "KV_CACHE_EVICTION_RATE", "Average", "{:,.2f}"),
    "oom": Figure("Refused for want of memory", "KV_CACHE_OOM", "Sum", "{:,.0f}"),
    "ttft_p50_ms": Figure("TTFT p50 (ms)", "TTFT", "p50", "{:,.1f}"),
    "ttft_p99_ms": Figure("TTFT p99 (ms)", "TTFT", "p99", "{:,.1f}"),
}
_HOUR_S = 3600
Figures = dict[str, dict[str, float | None]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `compare`."""
    text = "show the variants of an endpoint side by side"
    parser = subparsers.add_parser("compare", help=text, description="Hit rate, memory, TTFT and evictions by variant")
    parser.add_argument("endpoint", metavar="ENDPOINT", help="its name")
    parser.add_argument("--hours", type=int, default=24, metavar="N", help="time to look back on (default: 24)")
    namespace = OPTIONS["cloudwatch_namespace"].default
    parser.add_argument(
        "--namespace", default=namespace, metavar="NAME", help=f"option.cloudwatch_namespace (default: {namespace})"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table. 1 when AWS says no or there is no such endpoint."""
    try:
        found = figures(Cloud(), args.endpoint, namespace=args.namespace, hours=args.hours)
    except DeployError as error:
        print(f"kvreuse: error: {error.message}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if args.json else table(found))
    return 0


def figures(cloud: Cloud, endpoint_name: str, *, namespace: str, hours: int) -> Figures:
    """Variant -> figure -> its sum, or its mean over the hours weighted by samples; None if nothing was published."""
    endpoint = cloud.describe(endpoint_name)
    if endpoint is None:
        raise DeployError(f"there is no endpoint {endpoint_name}")
    names = [variant["VariantName"] for variant in endpoint["ProductionVariants"]]
    asked = query(endpoint_name, names, namespace=namespace, start=datetime.now(UTC) - timedelta(hours=hours))
    results = {result["Id"]: result for result in cloud.read(asked, "MetricDataResults")}
    return {
        name: {key: _over_hours(figure, results, f"v{number}_{key}") for key, figure in FIGURES.items()}
        for number, name in enumerate(names)
    }


def query(endpoint_name: str, variant_names: Sequence[str], *, namespace: str, start: datetime) -> Call:
    """Each figure by the hour from `start` to now, and how many samples it rests on."""
    queries = []
    for (number, name), (key, figure) in product(enumerate(variant_names), FIGURES.items()):
        metric = {"Namespace": figure.namespace or namespace, "MetricName": figure.metric,
                  "Dimensions": dimensions(endpoint_name, name)}  # fmt: skip
        for role, statistic in (("value", figure.statistic), ("weight", "SampleCount")):
            measured = {"Metric": metric, "Period": _HOUR_S, "Stat": statistic}
            queries.append({"Id": f"v{number}_{key}_{role}", "MetricStat": measured})
    end = datetime.now(start.tzinfo)
    return call("cloudwatch", "GetMetricData", MetricDataQueries=queries, StartTime=start, EndTime=end)


def _over_hours(figure: Figure, results: Mapping[str, Any], query_id: str) -> float | None:
    values, weights = (
        dict(zip(found["Timestamps"], found["Values"], strict=True))
        for found in (results[f"{query_id}_value"], results[f"{query_id}_weight"])
    )
    if figure.statistic != "Sum":
        values = {at: value * weights[at] / sum(weights.values()) for at, value in values.items()}
    return float(sum(values.values())) if values else None


def table(found: Figures) -> str:
    """A row per figure, a column per variant; - where nothing was published."""
    rows = [["", *found]]
    for key, figure in FIGURES.items():
        values = [variant[key] for variant in found.values()]
        rows.append([figure.title, *("-" if value is None else figure.shown.format(value) for value in values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(row) for row in padded)
