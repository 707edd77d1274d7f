"""How the calls of a plan are sent and how AWS's answers are read, against botocore's Stubber."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber
from ops.aws import ROLE

from kvreuse.ops.deploy import DeployError, Hosting
from kvreuse.ops.deploy.cloud import Cloud
from kvreuse.ops.deploy.compare import FIGURES, figures, query, table
from kvreuse.ops.deploy.plan import Endpoint, Fleet, Observed, plan_deploy
from kvreuse.ops.deploy.resources import call, update_endpoint
from kvreuse.ops.deploy.settings import Source

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ARN = "arn:aws:sagemaker:eu-west-1:123456789012:endpoint/toy"


class StubbedSession:
    """A session whose clients answer only what they were told to."""

    def __init__(self) -> None:
        self._session = boto3.Session("none", "none", region_name="eu-west-1")
        self._stubs: dict[str, Stubber] = {}

    def stub(self, service: str) -> Stubber:
        if service not in self._stubs:
            self._stubs[service] = Stubber(self._session.client(service))
            self._stubs[service].activate()
        return self._stubs[service]

    def client(self, service: str) -> Any:
        return self.stub(service).client

    def assert_all_was_asked(self) -> None:
        for stub in self._stubs.values():
            stub.assert_no_pending_responses()


def described(**changes: Any) -> dict[str, Any]:
    given = {"EndpointName": "toy", "EndpointArn": ARN, "EndpointConfigName": "new", "EndpointStatus": "InService"}
    return given | {"CreationTime": NOW, "LastModifiedTime": NOW} | changes


def an_update() -> Any:
    hosting = Hosting(endpoint_name="toy", instance_type="ml.g5.xlarge", bake_s=300)
    return update_endpoint(hosting, "new", alarms=["kvreuse/toy/main/oom"], smallest_fleet=4)


def test_an_update_is_sent_with_its_guard_and_waited_for() -> None:
    session = StubbedSession()
    stub = session.stub("sagemaker")
    steps = {
        "TrafficRoutingConfiguration": {
            "Type": "CANARY",
            "WaitIntervalInSeconds": 300,
            "CanarySize": {"Type": "INSTANCE_COUNT", "Value": 1},
        },
        "TerminationWaitInSeconds": 300,
        "MaximumExecutionTimeoutInSeconds": 14_400,
    }
    guard = {"BlueGreenUpdatePolicy": steps, "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": ANY}]}}
    sent = {"EndpointName": "toy", "EndpointConfigName": "new", "DeploymentConfig": guard}
    stub.add_response("update_endpoint", {"EndpointArn": ARN}, sent)
    stub.add_response("describe_endpoint", described())  # the waiter
    stub.add_response("describe_endpoint", described())  # was it rolled back?
    lines: list[str] = []
    Cloud(session).send([an_update()], say=lines.append)
    session.assert_all_was_asked()
    assert lines == ["UpdateEndpoint toy (and wait)"]


def test_an_update_that_ends_with_the_old_configuration_was_rolled_back() -> None:
    session = StubbedSession()
    stub = session.stub("sagemaker")
    stub.add_response("update_endpoint", {"EndpointArn": ARN})
    for _ in range(2):
        stub.add_response("describe_endpoint", described(EndpointConfigName="old", FailureReason="alarm oom"))
    with pytest.raises(DeployError, match="the update of endpoint toy was rolled back: alarm oom"):
        Cloud(session).send([an_update()])


def test_an_endpoint_that_fails_to_start_says_why() -> None:
    session = StubbedSession()
    stub = session.stub("sagemaker")
    stub.add_response("create_endpoint", {"EndpointArn": ARN})
    stub.add_response("describe_endpoint", described(EndpointStatus="Failed", FailureReason="no capacity"))
    made = {"EndpointName": "toy", "EndpointConfigName": "new"}
    with pytest.raises(DeployError, match=r"^CreateEndpoint: no capacity$"):
        Cloud(session).send([call("sagemaker", "CreateEndpoint", wait="endpoint_in_service", **made)])


def test_after_a_refusal_nothing_more_is_sent() -> None:
    session = StubbedSession()
    session.stub("sagemaker").add_client_error("delete_model", "AccessDeniedException", "not allowed")
    names = [call("sagemaker", "DeleteModel", ModelName=name) for name in ("a", "b")]
    with pytest.raises(DeployError, match=r"DeleteModel: .*not allowed"):
        Cloud(session).send(names)
    session.assert_all_was_asked()


def test_saved_queries_and_scaling_have_shapes_that_their_services_take() -> None:
    session = StubbedSession()
    hosting = Hosting(endpoint_name="toy", instance_type="ml.g5.xlarge", max_instance_count=3)
    source = Source(model_data="s3://b/m", role=ROLE, image_uri="image:1")
    observed = Observed(region="eu-west-1", queries={"kvreuse/toy/hit rate over time": "id-1"})
    sent = [
        planned
        for planned in plan_deploy(source, hosting, observed)
        if planned.service in ("logs", "application-autoscaling")
    ]
    answers = {
        "PutQueryDefinition": {"queryDefinitionId": "id-1"},
        "RegisterScalableTarget": {},
        "PutScalingPolicy": {"PolicyARN": "arn:aws:autoscaling:eu-west-1:123456789012:policy"},
    }
    for planned in sent:
        session.stub(planned.service).add_response(planned.method, answers[planned.operation], dict(planned.parameters))
    Cloud(session).send(sent)
    session.assert_all_was_asked()
    assert sent[0].operation == "RegisterScalableTarget"


def test_what_exists_is_read_over_all_pages_and_only_what_bears_the_tag() -> None:
    session = StubbedSession()
    tag = [{"Key": "kvreuse:endpoint", "Value": "toy"}]
    sagemaker = session.stub("sagemaker")
    logs, cloudwatch = session.stub("logs"), session.stub("cloudwatch")
    found = {"name": "kvreuse/toy/errors over time", "queryDefinitionId": "id-1"}
    logs.add_response("describe_query_definitions", {"queryDefinitions": [found]})
    cloudwatch.add_client_error("get_dashboard", "ResourceNotFound", "Dashboard kvreuse-toy does not exist")
    fleet = {"VariantName": "main", "DesiredInstanceCount": 3, "DesiredWeight": 1.0}
    config = {"EndpointConfigName": "new", "EndpointConfigArn": ARN, "CreationTime": NOW}
    sagemaker.add_response("describe_endpoint", described(ProductionVariants=[fleet]))
    sagemaker.add_response(
        "describe_endpoint_config",
        config | {"ProductionVariants": [{"VariantName": "main", "InstanceType": "ml.g5.xlarge"}]},
    )
    sagemaker.add_response("list_tags", {"Tags": tag})
    for page, names in enumerate((("toy-0123abcd", "toy-x"), ("toy-89abcdef",))):
        models = [{"ModelName": name, "ModelArn": f"{ARN}-{name}", "CreationTime": NOW} for name in names]
        sagemaker.add_response("list_models", {"Models": models} | ({"NextToken": "more"} if page == 0 else {}))
    for tags in (tag, []):
        sagemaker.add_response("list_tags", {"Tags": tags})
    sagemaker.add_response("list_endpoint_configs", {"EndpointConfigs": []})
    cloudwatch.add_response("describe_alarms", {"MetricAlarms": []})
    targets = session.stub("application-autoscaling")
    targets.add_response("describe_scalable_targets", {"ScalableTargets": []})
    observed = Cloud(session).observe("toy")
    session.assert_all_was_asked()
    assert observed == Observed(
        region="eu-west-1",
        endpoint=Endpoint("InService", "new", True, {"main": Fleet(instance_type="ml.g5.xlarge", count=3, weight=1.0)}),
        models=frozenset({"toy-0123abcd"}),
        queries={"kvreuse/toy/errors over time": "id-1"},
    )


def test_a_comparison_asks_for_every_figure_of_every_variant() -> None:
    asked = query("toy", ["main", "canary"], namespace="mine", start=NOW)
    queries = asked.parameters["MetricDataQueries"]
    assert len({one["Id"] for one in queries}) == 2 * 2 * len(FIGURES)
    dimensions = [
        {"Name": "EndpointName", "Value": "toy"},
        {"Name": "VariantName", "Value": "canary"},
    ]
    ttft = next(one["MetricStat"] for one in queries if one["Id"] == "v1_ttft_p99_ms_value")
    assert ttft == {
        "Metric": {"Namespace": "mine", "MetricName": "TTFT", "Dimensions": dimensions},
        "Period": 3600,
        "Stat": "p99",
    }


def test_hours_count_by_their_samples_and_sums_add_up() -> None:
    session = StubbedSession()
    fleets = [{"VariantName": "main"}]
    session.stub("sagemaker").add_response("describe_endpoint", described(ProductionVariants=fleets))
    hours = [NOW, NOW + timedelta(hours=1)]
    values = {"hit_rate_value": [0.2, 0.8], "hit_rate_weight": [30.0, 10.0], "oom_value": [2.0, 3.0]}
    values |= {"oom_weight": [60.0, 60.0]}
    results = []
    for key in FIGURES:
        for role in ("value", "weight"):
            found = values.get(f"{key}_{role}", [])
            results.append({"Id": f"v0_{key}_{role}", "Timestamps": hours[: len(found)], "Values": found})
    session.stub("cloudwatch").add_response("get_metric_data", {"MetricDataResults": results})
    found_figures = figures(Cloud(session), "toy", namespace="kvreuse", hours=2)
    assert found_figures["main"]["hit_rate"] == pytest.approx(0.35)
    assert found_figures["main"]["oom"] == 5
    assert found_figures["main"]["ttft_p50_ms"] is None
    lines = table(found_figures).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split()[-1] == "35.0%"
