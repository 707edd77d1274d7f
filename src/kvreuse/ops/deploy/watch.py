"""The calls that make an endpoint watched: alarms, dashboard, saved queries, each from the JSON file of its name.

Knows CloudWatch's shapes. Knows nothing of what exists already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvreuse.ops.deploy.resources import Call, call, dimensions, tags
from kvreuse.ops.deploy.settings import MAIN, Hosting, Variant

__all__ = ["alarm_prefix", "dashboard", "dashboard_name", "marker", "put_alarms", "queries"]


@cache
def _data(name: str) -> Any:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))


def alarm_prefix(endpoint_name: str) -> str:
    """Of alarms and queries. A slash cannot be in an endpoint's name, so no other endpoint's begin like this."""
    return f"kvreuse/{endpoint_name}/"


def put_alarms(hosting: Hosting, fleets: Sequence[Variant], *, rolls_back: bool) -> list[Call]:
    """Those that undo an update, which must exist before it, or the others, which go off without an endpoint.

    A fleet that is merely cold sets off none of the former. Without metrics of ours there are no alarms on them.
    """
    return [
        _put_alarm(hosting, variant, kind)
        for variant in fleets
        for kind, alarm in _data("alarms").items()
        if alarm["rolls_back"] is rolls_back
        and (variant.name == MAIN or kind != "hit-rate")
        and (variant.config.cloudwatch == "on" or "Namespace" in alarm)
    ]


def _put_alarm(hosting: Hosting, variant: Variant, kind: str) -> Call:
    given = {"Namespace": variant.config.cloudwatch_namespace, "Threshold": hosting.hit_rate_alarm}
    alarm = given | {name: value for name, value in _data("alarms")[kind].items() if name != "rolls_back"}
    return call(
        "cloudwatch",
        "PutMetricAlarm",
        AlarmName=f"{alarm_prefix(hosting.endpoint_name)}{variant.name}/{kind}",
        **alarm,
        Dimensions=dimensions(hosting.endpoint_name, variant.name),
        AlarmActions=[hosting.alarm_topic] if hosting.alarm_topic else None,
        Tags=tags(hosting.endpoint_name),
    )


def dashboard_name(endpoint_name: str) -> str:
    """One for each endpoint."""
    return f"kvreuse-{endpoint_name}"


def marker(endpoint_name: str) -> str:
    """Stands on the dashboard and says whose it is."""
    return f"Made by kvreuse deploy for kvreuse:endpoint={endpoint_name}: what is changed here is overwritten"


def dashboard(hosting: Hosting, fleets: Sequence[Variant], *, region: str) -> Call:
    """Every plot shows the variants beside each other."""
    name = hosting.endpoint_name
    text = {"type": "text", "width": 24, "height": 1, "properties": {"markdown": marker(name)}}
    plots = []
    for title, plotted in _data("dashboard").items():
        metrics = [
            [*_metric(fleet, *series), "EndpointName", name, "VariantName", fleet.name, {"stat": series[1]}]
            for fleet in fleets
            for series in plotted
        ]
        properties = {"title": title, "region": region, "period": 60, "metrics": metrics}
        plots.append({"type": "metric", "width": 12, "height": 6, "properties": properties})
    body = json.dumps({"widgets": [text, *plots]})
    return call("cloudwatch", "PutDashboard", DashboardName=dashboard_name(name), DashboardBody=body)


def _metric(fleet: Variant, name: str, _statistic: str, namespace: str | None = None) -> tuple[str, str]:
    return namespace or fleet.config.cloudwatch_namespace, name


def queries(endpoint_name: str, known_ids: Mapping[str, str]) -> list[Call]:
    """Saved queries over the request log. known_ids: name -> id of those that exist, which are then replaced."""
    return [
        call(
            "logs",
            "PutQueryDefinition",
            name=alarm_prefix(endpoint_name) + title,
            queryString="\n| ".join(lines),
            logGroupNames=[f"/aws/sagemaker/Endpoints/{endpoint_name}"],
            queryDefinitionId=known_ids.get(alarm_prefix(endpoint_name) + title),
        )
        for title, lines in _data("queries").items()
    ]
