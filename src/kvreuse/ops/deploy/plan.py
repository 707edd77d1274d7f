"""From what is wanted and what exists to the calls that lead there. Pure: the same input gives the same calls.

Knows the order in which AWS allows changes. Sends and reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvreuse.errors import ConfigError
from kvreuse.ops.deploy import resources, watch
from kvreuse.ops.deploy.resources import Call, call
from kvreuse.ops.deploy.settings import Hosting, Source, Variant, variants

__all__ = ["Endpoint", "Fleet", "Observed", "plan_deploy", "plan_destroy"]

_DEAD = ("Failed", "OutOfService")  # such an endpoint can only be deleted


@dataclass(frozen=True, slots=True)
class Fleet:
    """A variant that exists: its instances and its share of the traffic, as last asked for."""

    instance_type: str
    count: int
    weight: float


class Endpoint(NamedTuple):
    """An endpoint that exists. fleets: by the variant's name."""

    status: str
    config_name: str
    is_ours: bool
    fleets: Mapping[str, Fleet]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What exists of one endpoint; but for the endpoint itself and the dashboard, only what `deploy` has made.

    scaled: names of the variants with a scalable target. dashboard: the body of the one that bears the endpoint's
    name, whoever made it. queries: name -> id.
    """

    region: str
    endpoint: Endpoint | None = None
    models: frozenset[str] = frozenset()
    configs: frozenset[str] = frozenset()
    alarms: frozenset[str] = frozenset()
    scaled: frozenset[str] = frozenset()
    dashboard: str | None = None
    queries: Mapping[str, str] = field(default_factory=dict)


def plan_deploy(source: Source, hosting: Hosting, observed: Observed) -> tuple[Call, ...]:
    """The calls that make or update the endpoint and all that belongs to it.

    Earlier models and configurations stay, to go back to. Raises ConfigError for an endpoint that is busy or not ours.
    """
    name = hosting.endpoint_name
    found = _usable(name, observed)
    if observed.dashboard is not None and watch.marker(name) not in observed.dashboard:
        raise _not_ours(f"dashboard {watch.dashboard_name(name)}")
    live = None if found is None or found.status in _DEAD else found
    wanted = [_at_live_count(variant, live) for variant in variants(source, hosting)]
    models = [resources.create_model(source, hosting, variant) for variant in wanted]
    fleets = [(variant, str(model.parameters["ModelName"])) for variant, model in zip(wanted, models, strict=True)]
    guards = watch.put_alarms(hosting, wanted, rolls_back=True)
    alarms = watch.put_alarms(hosting, wanted, rolls_back=False)
    surplus = observed.alarms - {alarm.parameters["AlarmName"] for alarm in [*guards, *alarms]}
    return (
        *(model for model in models if model.parameters["ModelName"] not in observed.models),
        *guards,
        *(_delete_endpoint(name, observed) if found is not live else ()),
        *_endpoint(hosting, wanted, config=resources.create_config(hosting, fleets), observed=observed, live=live),
        *(scaling for variant in wanted if variant.is_scaled for scaling in resources.scale(hosting, variant)),
        *alarms,
        watch.dashboard(hosting, wanted, region=observed.region),
        *watch.queries(name, observed.queries),
        *_delete_alarms(surplus),
    )


def plan_destroy(endpoint_name: str, observed: Observed) -> tuple[Call, ...]:
    """The calls that remove all that `deploy` has made. Raises ConfigError for an endpoint that is busy or not ours."""
    found = _usable(endpoint_name, observed)
    board = [watch.dashboard_name(endpoint_name)] if watch.marker(endpoint_name) in (observed.dashboard or "") else []
    return (
        *(_delete_endpoint(endpoint_name, observed) if found else ()),
        *(call("sagemaker", "DeleteEndpointConfig", EndpointConfigName=name) for name in sorted(observed.configs)),
        *(call("sagemaker", "DeleteModel", ModelName=name) for name in sorted(observed.models)),
        *_delete_alarms(observed.alarms),
        *([call("cloudwatch", "DeleteDashboards", DashboardNames=board)] if board else ()),
        *(call("logs", "DeleteQueryDefinition", queryDefinitionId=found_id) for found_id in observed.queries.values()),
    )


def _usable(endpoint_name: str, observed: Observed) -> Endpoint | None:
    """The endpoint, if there is one. Refuses what others made and what AWS is still changing."""
    found = observed.endpoint
    if found and not found.is_ours:
        raise _not_ours(f"endpoint {endpoint_name}")
    if found and found.status not in (*_DEAD, "InService"):
        raise ConfigError(f"endpoint {endpoint_name} is {found.status}\nhint: run it again when that is over")
    return found


def _not_ours(what: str) -> ConfigError:
    return ConfigError(f"{what} was not made by kvreuse deploy\nhint: choose another name for the endpoint")


def _at_live_count(variant: Variant, live: Endpoint | None) -> Variant:
    """What autoscaling has added stays: a new fleet begins with as many instances as the old one has."""
    fleet = live.fleets.get(variant.name) if live else None
    if fleet is None or not variant.is_scaled:
        return variant
    return replace(variant, count=min(max(fleet.count, variant.min_count), variant.max_count))


def _endpoint(
    hosting: Hosting, wanted: Sequence[Variant], *, config: Call, observed: Observed, live: Endpoint | None
) -> Iterator[Call]:
    """Create it, or give it new fleets, or change only the numbers of those it has, which keeps their stores."""
    name = str(config.parameters["EndpointConfigName"])
    if live and resources.shape_prefix(live.config_name) == resources.shape_prefix(name):
        yield from _deregister(hosting.endpoint_name, observed.scaled - {v.name for v in wanted if v.is_scaled})
        yield from _rebalance(hosting.endpoint_name, wanted, live)
        return
    if name not in observed.configs:
        yield config
    if not live:
        yield resources.create_endpoint(hosting.endpoint_name, name)
        return
    # AWS refuses to change the instance type of a variant, or to remove it, while autoscaling holds it.
    kept = {variant.name for variant in wanted if variant.is_scaled} & set(live.fleets)
    kept = {name for name in kept if live.fleets[name].instance_type == hosting.instance_type}
    yield from _deregister(hosting.endpoint_name, observed.scaled - kept)
    has_same_names = {variant.name for variant in wanted} == set(live.fleets)
    guards = watch.put_alarms(hosting, wanted, rolls_back=True) if has_same_names else []
    alarms = [guard.parameters["AlarmName"] for guard in guards]
    smallest = min(variant.count for variant in wanted)
    yield resources.update_endpoint(hosting, name, alarms=alarms, smallest_fleet=smallest)


def _rebalance(endpoint_name: str, wanted: Sequence[Variant], live: Endpoint) -> Iterator[Call]:
    changed = [
        {"VariantName": variant.name, "DesiredWeight": variant.weight, "DesiredInstanceCount": variant.count}
        for variant in wanted
        if not _is_same(variant, live.fleets[variant.name])
    ]
    if changed:
        named = {"EndpointName": endpoint_name, "DesiredWeightsAndCapacities": changed}
        yield call("sagemaker", "UpdateEndpointWeightsAndCapacities", wait="endpoint_in_service", **named)


def _is_same(variant: Variant, fleet: Fleet) -> bool:
    """Weights come back in single precision."""
    return fleet.count == variant.count and math.isclose(fleet.weight, variant.weight, rel_tol=1e-5)


def _delete_endpoint(endpoint_name: str, observed: Observed) -> Iterator[Call]:
    yield from _deregister(endpoint_name, observed.scaled)
    yield call("sagemaker", "DeleteEndpoint", wait="endpoint_deleted", EndpointName=endpoint_name)


def _deregister(endpoint_name: str, variant_names: Iterable[str]) -> Iterator[Call]:
    """This removes the variant's scaling policy and its alarms as well."""
    for name in sorted(variant_names):
        target = resources.scalable_id(endpoint_name, name)
        yield call("application-autoscaling", "DeregisterScalableTarget", **target)


def _delete_alarms(names: Iterable[str]) -> Iterator[Call]:
    if found := sorted(names):
        yield call("cloudwatch", "DeleteAlarms", AlarmNames=found)
