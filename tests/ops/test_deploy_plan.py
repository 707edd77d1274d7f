"""Plans of deployments: which calls, in which order, each within what the services allow. Nothing is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ops.aws import ROLE, limit_faults

from kvreuse.errors import ConfigError
from kvreuse.ops.deploy import Canary, Hosting
from kvreuse.ops.deploy.compare import FIGURES
from kvreuse.ops.deploy.plan import Endpoint, Fleet, Observed, plan_deploy, plan_destroy
from kvreuse.ops.deploy.resources import Call, call, policy
from kvreuse.ops.deploy.settings import Source
from kvreuse.telemetry.catalog import CATALOG

LONG = "n" * 63
GPU, CPU = "ml.g5.xlarge", "ml.c5.xlarge"
NOTHING = Observed(region="eu-west-1")


def source(**changes: Any) -> Source:
    return Source(**{"model_data": "s3://bucket/model", "role": ROLE, "image_uri": "image:1", **changes})


def hosting(**changes: Any) -> Hosting:
    return Hosting.of({"instance_type": GPU, **changes})


def plan(
    observed: Observed = NOTHING, *, options: Mapping[str, object] | None = None, **changes: Any
) -> tuple[Call, ...]:
    return plan_deploy(source(options=options or {}), hosting(**changes), observed)


def after(calls: tuple[Call, ...], *, instance_type: str = GPU, **counts: int) -> Observed:
    """What exists once a first plan was carried out; counts: variant -> its instances by now."""
    by_operation: dict[str, list[Mapping[str, Any]]] = {}
    for sent in calls:
        by_operation.setdefault(sent.operation, []).append(sent.parameters)
    config = by_operation["CreateEndpointConfig"][0]
    fleets = {
        variant["VariantName"]: Fleet(
            instance_type=instance_type,
            count=counts.get(variant["VariantName"], variant["InitialInstanceCount"]),
            weight=variant["InitialVariantWeight"],
        )
        for variant in config["ProductionVariants"]
    }
    targets = by_operation.get("RegisterScalableTarget", [])
    return Observed(
        region="eu-west-1",
        endpoint=Endpoint("InService", config["EndpointConfigName"], True, fleets),
        models=frozenset(made["ModelName"] for made in by_operation["CreateModel"]),
        configs=frozenset([config["EndpointConfigName"]]),
        alarms=frozenset(made["AlarmName"] for made in by_operation["PutMetricAlarm"]),
        scaled=frozenset(made["ResourceId"].split("/")[-1] for made in targets),
        dashboard=by_operation["PutDashboard"][0]["DashboardBody"],
        queries={made["name"]: f"id of {made['name']}" for made in by_operation["PutQueryDefinition"]},
    )


def operations(calls: tuple[Call, ...]) -> list[str]:
    """Without what replaces a thing by its equal."""
    upserts = ("PutMetricAlarm", "PutDashboard", "PutQueryDefinition")
    return [sent.operation for sent in calls if sent.operation not in upserts]


def one(calls: tuple[Call, ...], operation: str) -> Mapping[str, Any]:
    (found,) = [sent.parameters for sent in calls if sent.operation == operation]
    return found


def fleet(calls: tuple[Call, ...], name: str = "main") -> dict[str, Any]:
    fleets = one(calls, "CreateEndpointConfig")["ProductionVariants"]
    (found,) = [variant for variant in fleets if variant["VariantName"] == name]
    return dict(found)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"endpoint_name": "a"},
    {"endpoint_name": LONG, "canary": Canary(weight=0.001)},
    {"instance_type": CPU, "initial_instance_count": 4, "max_instance_count": 10, "volume_size_gb": 512},
    {"max_instance_count": 2, "autoscaling_metric": "gpu", "alarm_topic": "arn:aws:sns:eu-west-1:123456789012:alarms"},
    {"startup_timeout_s": 60, "download_timeout_s": 60, "prefix_length_bytes": 1024, "bake_s": 0, "volume_size_gb": 1},
    {"startup_timeout_s": 3600, "download_timeout_s": 3600, "bake_s": 3600, "initial_instance_count": 2},
    {"prefix_length_bytes": 65_536, "prefix_concurrency": 1024, "initial_instance_count": 10_000},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_call_is_within_the_limits_of_its_service(settings: dict[str, Any]) -> None:
    first = plan(options={"max_batch_size": 4096, "max_batch_tokens": 4096}, **settings)
    second = plan(after(first), options={"max_batch_size": 1}, **settings)
    last = plan_destroy(settings.get("endpoint_name", "kvreuse"), after(first))
    assert {sent.operation for sent in second} >= {"UpdateEndpoint", "PutQueryDefinition"}
    assert [fault for sent in (*first, *second, *last) for fault in limit_faults(sent)] == []


@pytest.mark.parametrize(
    ("operation", "parameters"),
    [
        ("DeleteModel", {}),
        ("DeleteModel", {"ModelName": "m" * 64}),
        ("DeleteModel", {"ModelName": "a/b"}),
        ("DeleteModel", {"ModelName": 1}),
        ("DeleteModel", {"ModelName": "m", "Force": True}),
        ("CreateEndpointConfig", {"EndpointConfigName": "c", "ProductionVariants": []}),
        (
            "CreateEndpointConfig",
            {"EndpointConfigName": "c", "ProductionVariants": [{"VariantName": "v", "InferenceAmiVersion": "none"}]},
        ),
        (
            "CreateEndpointConfig",
            {"EndpointConfigName": "c", "ProductionVariants": [{"VariantName": "v", "VolumeSizeInGB": 513}]},
        ),
    ],
)
def test_the_check_of_limits_catches_an_offender(operation: str, parameters: dict[str, Any]) -> None:
    assert limit_faults(call("sagemaker", operation, **parameters)) != []


def test_the_model_is_an_unpacked_prefix() -> None:
    container = one(plan(), "CreateModel")["PrimaryContainer"]
    assert container["ModelDataSource"]["S3DataSource"] == {
        "S3Uri": "s3://bucket/model/",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }


def test_a_network_of_ones_own_reaches_the_model() -> None:
    network = {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}
    calls = plan_deploy(source(vpc_config=network), hosting(), NOTHING)
    assert one(calls, "CreateModel")["VpcConfig"] == network
    assert "VpcConfig" not in one(plan(), "CreateModel")


def test_requests_are_routed_by_prefix_from_two_instances_on() -> None:
    assert "RoutingConfig" not in fleet(plan())
    by_prefix = {"PrefixLength": 4096, "ConcurrencyThreshold": 7}
    for counts in ({"initial_instance_count": 2}, {"max_instance_count": 2}):
        routing = fleet(plan(options={"max_batch_size": 7}, **counts))["RoutingConfig"]
        assert routing == {"RoutingStrategy": "PREFIX_AWARE", "PrefixAwareRoutingConfig": by_prefix}


@pytest.mark.parametrize("instance_type", ["ml.g4dn.xlarge", "ml.g5.xlarge", "ml.g6e.xlarge", "ml.p5.48xlarge"])
def test_instances_with_a_gpu_get_a_driver_for_cuda_13(instance_type: str) -> None:
    found = fleet(plan(instance_type=instance_type))
    assert found["InferenceAmiVersion"] == "al2023-ami-sagemaker-inference-gpu-4-1"


@pytest.mark.parametrize("instance_type", ["ml.c5.xlarge", "ml.inf2.xlarge", "ml.m7i.large"])
def test_instances_without_a_gpu_get_the_default_image(instance_type: str) -> None:
    assert "InferenceAmiVersion" not in fleet(plan(instance_type=instance_type))


def test_alarms_that_guard_an_update_exist_before_it_and_the_others_only_after_the_endpoint() -> None:
    calls = plan(after(plan()), options={"max_batch_size": 4})
    names = [sent.parameters.get("AlarmName", sent.operation) for sent in calls]
    update = one(calls, "UpdateEndpoint")["DeploymentConfig"]
    guards = [alarm["AlarmName"] for alarm in update["AutoRollbackConfiguration"]["Alarms"]]
    assert [name.rpartition("/")[2] for name in guards] == ["oom", "audit-mismatch", "errors"]
    at = names.index("UpdateEndpoint")
    assert set(guards) <= set(names[:at])
    assert {"kvreuse/kvreuse/main/engine-dead", "kvreuse/kvreuse/main/hit-rate"} <= set(names[at:])


def test_a_cold_fleet_sets_off_no_alarm_that_would_undo_an_update() -> None:
    calls = plan(after(plan()), options={"max_batch_size": 4})
    update = one(calls, "UpdateEndpoint")["DeploymentConfig"]
    guards = {alarm["AlarmName"] for alarm in update["AutoRollbackConfiguration"]["Alarms"]}
    alarms = {sent.parameters["AlarmName"]: sent.parameters for sent in calls if sent.operation == "PutMetricAlarm"}
    assert {alarms[name]["TreatMissingData"] for name in guards} == {"notBreaching"}
    assert "KV_CACHE_HIT_RATE" not in {alarms[name]["MetricName"] for name in guards}


def test_without_published_metrics_only_the_alarm_on_errors_is_left() -> None:
    calls = plan(options={"cloudwatch": "off"})
    assert [sent.parameters["AlarmName"] for sent in calls if sent.operation == "PutMetricAlarm"] == [
        "kvreuse/kvreuse/main/errors"
    ]


def test_alarms_look_where_the_container_publishes() -> None:
    calls = plan(options={"cloudwatch_namespace": "mine"})
    spaces = {sent.parameters["Namespace"] for sent in calls if sent.operation == "PutMetricAlarm"}
    assert spaces == {"mine", "AWS/SageMaker"}
    assert (
        '["mine", "TTFT", "EndpointName", "kvreuse", "VariantName", "main"'
        in (one(calls, "PutDashboard")["DashboardBody"])
    )


def test_the_metrics_that_are_watched_are_published() -> None:
    calls = plan()
    watched = {
        sent.parameters["MetricName"]
        for sent in calls
        if sent.operation == "PutMetricAlarm" and sent.parameters["Namespace"] == "kvreuse"
    }
    widgets = json.loads(one(calls, "PutDashboard")["DashboardBody"])["widgets"]
    plotted = [line for widget in widgets for line in widget["properties"].get("metrics", [])]
    watched |= {line[1] for line in plotted if line[0] == "kvreuse"}
    watched |= {figure.metric for figure in FIGURES.values() if figure.namespace is None}
    assert len(watched) > 10
    assert watched <= {published.name for published in CATALOG}


def test_the_dashboard_shows_the_variants_beside_each_other() -> None:
    widgets = json.loads(one(plan(canary=Canary(weight=0.1)), "PutDashboard")["DashboardBody"])["widgets"]
    for widget in widgets[1:]:
        assert {line[5] for line in widget["properties"]["metrics"]} == {"main", "canary"}


def test_a_fleet_of_one_is_replaced_at_once_and_a_larger_one_in_two_steps() -> None:
    found = []
    for count in (1, 2, 9):
        calls = plan(
            after(plan(initial_instance_count=count)), options={"max_batch_size": 4}, initial_instance_count=count
        )
        guard = one(calls, "UpdateEndpoint")["DeploymentConfig"]["BlueGreenUpdatePolicy"]
        traffic = guard["TrafficRoutingConfiguration"]
        found.append((traffic["Type"], traffic.get("CanarySize", {}).get("Value")))
    assert found == [("ALL_AT_ONCE", None), ("CANARY", 1), ("CANARY", 2)]


def test_an_update_that_brings_or_takes_a_variant_has_no_deployment_configuration() -> None:
    canary = Canary(weight=0.1)
    for before, now in ((None, canary), (canary, None)):
        calls = plan(after(plan(canary=before)), canary=now)
        assert "DeploymentConfig" not in one(calls, "UpdateEndpoint")


def test_the_same_again_needs_no_call_that_changes() -> None:
    for settings in SETTINGS:
        assert [name for name in operations(plan(after(plan(**settings)), **settings)) if "Scal" not in name] == []


def test_counts_and_weights_alone_change_the_running_fleets() -> None:
    observed = after(plan(initial_instance_count=2, canary=Canary(weight=0.1)))
    calls = plan(observed, initial_instance_count=3, canary=Canary(weight=0.2))
    assert operations(calls) == ["UpdateEndpointWeightsAndCapacities"]
    assert one(calls, "UpdateEndpointWeightsAndCapacities")["DesiredWeightsAndCapacities"] == [
        {"VariantName": "main", "DesiredWeight": 0.8, "DesiredInstanceCount": 3},
        {"VariantName": "canary", "DesiredWeight": 0.2, "DesiredInstanceCount": 1},
    ]


def test_a_weight_in_single_precision_is_the_same_weight() -> None:
    observed = after(plan(canary=Canary(weight=0.01)))
    assert observed.endpoint is not None
    fleets = {"main": 0.9900000095367432, "canary": 0.009999999776482582}
    live = {name: Fleet(instance_type=GPU, count=1, weight=weight) for name, weight in fleets.items()}
    observed = replace(observed, endpoint=observed.endpoint._replace(fleets=live))
    assert operations(plan(observed, canary=Canary(weight=0.01))) == []


def test_what_autoscaling_added_stays_within_its_bounds() -> None:
    observed = after(plan(max_instance_count=6), main=5)
    assert fleet(plan(observed, options={"max_batch_size": 4}, max_instance_count=6))["InitialInstanceCount"] == 5
    assert fleet(plan(observed, options={"max_batch_size": 4}, max_instance_count=3))["InitialInstanceCount"] == 3
    assert fleet(plan(observed, options={"max_batch_size": 4}))["InitialInstanceCount"] == 1


def test_autoscaling_goes_before_the_instance_type_changes_and_comes_back_after() -> None:
    calls = plan(after(plan(max_instance_count=3), instance_type=GPU), instance_type=CPU, max_instance_count=3)
    names = operations(calls)
    order = ["DeregisterScalableTarget", "UpdateEndpoint", "RegisterScalableTarget", "PutScalingPolicy"]
    assert [name for name in names if name in order] == order


def test_autoscaling_stays_through_an_update_that_keeps_the_instance_type() -> None:
    calls = plan(after(plan(max_instance_count=3)), options={"max_batch_size": 4}, max_instance_count=3)
    assert "DeregisterScalableTarget" not in operations(calls)


def test_autoscaling_that_is_no_longer_wanted_goes() -> None:
    assert operations(plan(after(plan(initial_instance_count=2, max_instance_count=3)), initial_instance_count=2)) == [
        "DeregisterScalableTarget"
    ]


def test_autoscaling_follows_concurrency_with_long_cooldowns() -> None:
    calls = plan(options={"max_batch_size": 16}, initial_instance_count=2, max_instance_count=5)
    assert one(calls, "RegisterScalableTarget").items() >= {("MinCapacity", 2), ("MaxCapacity", 5)}
    assert one(calls, "PutScalingPolicy")["TargetTrackingScalingPolicyConfiguration"] == {
        "TargetValue": 12,
        "PredefinedMetricSpecification": {
            "PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"
        },
        "ScaleOutCooldown": 300,
        "ScaleInCooldown": 1800,
    }


def test_autoscaling_can_follow_the_gpu() -> None:
    calls = plan(max_instance_count=5, autoscaling_metric="gpu", autoscaling_target=80.0)
    tracking = one(calls, "PutScalingPolicy")["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["TargetValue"] == 80
    assert tracking["CustomizedMetricSpecification"]["MetricName"] == "GPUUtilization"


def test_saved_queries_are_replaced_by_their_id() -> None:
    calls = plan(after(plan()))
    found = {sent.parameters["queryDefinitionId"] for sent in calls if sent.operation == "PutQueryDefinition"}
    assert "id of kvreuse/kvreuse/hit rate over time" in found
    assert all("queryDefinitionId" not in sent.parameters for sent in plan())


def test_names_leave_room_for_their_digests_and_differ_with_the_content() -> None:
    names = {one(plan(endpoint_name=LONG, options={"max_batch_size": n}), "CreateModel")["ModelName"] for n in (4, 8)}
    assert len(names) == 2
    assert one(plan(endpoint_name=LONG, options={"max_batch_size": 4}), "CreateModel")["ModelName"] in names
    assert len(one(plan(endpoint_name=LONG), "CreateEndpointConfig")["EndpointConfigName"]) <= 63


def test_destroy_lets_go_of_the_endpoint_before_what_it_stands_on() -> None:
    calls = plan_destroy("kvreuse", after(plan(max_instance_count=3)))
    assert list(dict.fromkeys(sent.operation for sent in calls)) == [
        "DeregisterScalableTarget",
        "DeleteEndpoint",
        "DeleteEndpointConfig",
        "DeleteModel",
        "DeleteAlarms",
        "DeleteDashboards",
        "DeleteQueryDefinition",
    ]


@pytest.mark.parametrize("status", ["Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"])
def test_an_endpoint_in_motion_is_neither_updated_nor_destroyed(status: str) -> None:
    busy = replace(NOTHING, endpoint=Endpoint(status, "c", True, {}))
    with pytest.raises(ConfigError, match=f"endpoint kvreuse is {status}"):
        plan(busy)
    with pytest.raises(ConfigError, match=f"endpoint kvreuse is {status}"):
        plan_destroy("kvreuse", busy)


def test_the_policy_allows_every_planned_call_and_names_only_this_endpoint() -> None:
    document = policy("toy", role=ROLE)
    allowed = {action for statement in document["Statement"] for action in statement["Action"]}
    first = plan(endpoint_name="toy", max_instance_count=2)
    calls = (
        *first,
        *plan(after(first), endpoint_name="toy", canary=Canary(weight=0.1)),
        *plan_destroy("toy", after(first)),
    )
    assert {f"{sent.service}:{sent.operation}" for sent in calls} <= allowed
    narrow = [statement for statement in document["Statement"] if statement["Resource"] != "*"]
    named = [
        text
        for statement in narrow
        if statement["Sid"] in ("Endpoint", "Alarms", "Dashboard")
        for text in ([statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"])
    ]
    assert all(re.search(r"[/:-]toy(-\*|/\*)?$", text) for text in named)
    assert ROLE in [statement["Resource"] for statement in document["Statement"]]


def test_a_dashboard_of_others_is_not_overwritten() -> None:
    theirs = replace(NOTHING, dashboard='{"widgets": []}')
    with pytest.raises(ConfigError, match="dashboard kvreuse-kvreuse was not made by kvreuse deploy"):
        plan(theirs)
    assert plan_destroy("kvreuse", theirs) == ()


def test_going_back_to_what_was_there_before_makes_nothing_anew() -> None:
    first = after(plan())
    second = after(plan(first, options={"max_batch_size": 4}))
    both = replace(second, models=first.models | second.models, configs=first.configs | second.configs)
    assert operations(plan(both)) == ["UpdateEndpoint"]


@pytest.mark.parametrize("status", ["Failed", "OutOfService"])
def test_an_endpoint_that_can_only_be_deleted_goes_before_it_is_made_again(status: str) -> None:
    observed = after(plan(max_instance_count=2))
    assert observed.endpoint is not None
    dead = replace(observed, endpoint=observed.endpoint._replace(status=status))
    order = ["DeregisterScalableTarget", "DeleteEndpoint", "CreateEndpoint", "RegisterScalableTarget"]
    assert operations(plan(dead, max_instance_count=2)) == [*order, "PutScalingPolicy"]


def test_a_name_that_is_cut_at_a_dash_still_makes_valid_names() -> None:
    calls = plan(endpoint_name="n" * 46 + "-" + "n" * 16)
    assert "--" not in one(calls, "CreateModel")["ModelName"]
    assert [fault for sent in calls for fault in limit_faults(sent)] == []


OTHERS: dict[str, Any] = {
    "endpoint_name": "toy",
    "instance_type": CPU,
    "initial_instance_count": 3,
    "max_instance_count": 5,
    "autoscaling_metric": "gpu",
    "autoscaling_target": 7.0,
    "scale_out_cooldown_s": 17,
    "scale_in_cooldown_s": 17,
    "inference_ami_version": "al2-ami-sagemaker-inference-gpu-3-1",
    "volume_size_gb": 17,
    "startup_timeout_s": 77,
    "download_timeout_s": 77,
    "prefix_length_bytes": 1717,
    "prefix_concurrency": 17,
    "bake_s": 17,
    "hit_rate_alarm": 0.17,
    "alarm_topic": "arn:aws:sns:eu-west-1:123456789012:alarms",
    "canary": Canary(weight=0.17),
}


@pytest.mark.parametrize("setting", Hosting.__dataclass_fields__)
def test_every_setting_reaches_aws(setting: str) -> None:
    base = {"initial_instance_count": 2, "max_instance_count": 4}
    found = []
    for settings in (base, base | {setting: OTHERS[setting]}):
        before = after(plan(**settings))
        found.append((plan(**settings), plan(before, options={"max_batch_size": 4}, **settings)))
    assert found[0] != found[1]
    if setting in ("prefix_concurrency", "prefix_length_bytes", "alarm_topic", "inference_ami_version"):
        assert str(OTHERS[setting]) in str(found[1])


def test_a_canary_has_every_alarm_but_that_on_its_hit_rate() -> None:
    calls = plan(canary=Canary(weight=0.01))
    names = [sent.parameters["AlarmName"] for sent in calls if sent.operation == "PutMetricAlarm"]
    kinds = {
        fleet: {name.split("/")[3] for name in names if name.split("/")[2] == fleet} for fleet in ("main", "canary")
    }
    assert kinds["main"] - kinds["canary"] == {"hit-rate"}
    assert len(kinds["canary"]) == 4
