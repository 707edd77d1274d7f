"""Deployments end to end: boto3's real clients against moto's server, and the real container behind the runtime."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ops.aws import ROLE, Sent, aws, client
from serving import Container

from kvreuse.cli.main import main
from kvreuse.errors import ConfigError
from kvreuse.ops.deploy import Canary, DeployError, KVReuseModel, Predictor
from kvreuse.ops.deploy.resources import policy

FOLDER = Path(__file__).parents[2] / "src" / "kvreuse" / "ops" / "deploy"
TYPE = "ml.g4dn.xlarge"
FLAGS = ["--model-data", "s3://bucket/toy/", "--role", ROLE, "--image-uri", "image:1", "--instance-type", TYPE]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    with aws(monkeypatch) as sent:
        yield sent


def model(**options: Any) -> KVReuseModel:
    return KVReuseModel(model_data="s3://bucket/toy", role=ROLE, image_uri="image:1", **options)


def everything() -> dict[str, list[str]]:
    """The names of all that is in the account."""
    sagemaker, cloudwatch = client("sagemaker"), client("cloudwatch")
    scaling, logs = client("application-autoscaling"), client("logs")
    return {
        "endpoints": [item["EndpointName"] for item in sagemaker.list_endpoints()["Endpoints"]],
        "configs": [item["EndpointConfigName"] for item in sagemaker.list_endpoint_configs()["EndpointConfigs"]],
        "models": [item["ModelName"] for item in sagemaker.list_models()["Models"]],
        "alarms": [item["AlarmName"] for item in cloudwatch.describe_alarms()["MetricAlarms"]],
        "dashboards": [item["DashboardName"] for item in cloudwatch.list_dashboards()["DashboardEntries"]],
        "targets": [
            item["ResourceId"]
            for item in scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
        ],
        "queries": [item["name"] for item in logs.describe_query_definitions()["queryDefinitions"]],
    }


def actions(document: dict[str, Any]) -> set[str]:
    """All that a policy allows."""
    given = [statement["Action"] for statement in document["Statement"]]
    return {action for some in given for action in ([some] if isinstance(some, str) else some)}


def live(name: str) -> dict[str, tuple[int, float]]:
    found = client("sagemaker").describe_endpoint(EndpointName=name)
    return {
        variant["VariantName"]: (variant["DesiredInstanceCount"], round(variant["DesiredWeight"], 6))
        for variant in found["ProductionVariants"]
    }


def variables(name: str) -> dict[str, dict[str, str]]:
    """Variant -> environment of its container, as it is deployed."""
    sagemaker = client("sagemaker")
    config = sagemaker.describe_endpoint(EndpointName=name)["EndpointConfigName"]
    found = sagemaker.describe_endpoint_config(EndpointConfigName=config)["ProductionVariants"]
    return {
        variant["VariantName"]: sagemaker.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"][
            "Environment"
        ]
        for variant in found
    }


def test_deploy_invoke_update_destroy(account: Sent, runtime_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", runtime_url)
    hosting = {"endpoint_name": "toy", "instance_type": TYPE, "initial_instance_count": 2, "max_instance_count": 4}

    predictor = model(kv_cache_batch_size=8, enable_kv_sharing=True).deploy(**hosting)
    assert live("toy") == {"main": (2, 1.0)}
    assert variables("toy")["main"].items() >= {("OPTION_MAX_BATCH_SIZE", "8"), ("OPTION_KV_CACHE_REUSE", "true")}

    prompt = {"inputs": "The drawers are alpha, beta and gamma. " * 20, "parameters": {"max_new_tokens": 2}}
    answers = [predictor.predict(prompt) for _ in range(2)]
    assert answers[0][0]["generated_text"] == answers[1][0]["generated_text"]

    model(kv_cache_batch_size=16).deploy(**hosting)
    assert variables("toy")["main"]["OPTION_MAX_BATCH_SIZE"] == "16"
    assert everything()["targets"] == ["endpoint/toy/variant/main"]

    Predictor("toy").destroy()
    assert not any(everything().values())
    assert set(account.operations) <= actions(policy("toy", role=ROLE))


def test_a_second_run_changes_nothing(account: Sent) -> None:
    hosting = {"instance_type": TYPE, "canary": Canary(weight=0.01, options={"kv_cache_memory_ratio": 0.6})}
    model().deploy(**hosting)
    before, seen = everything(), len(account.changes)
    model().deploy(**hosting)
    assert everything() == before
    # These replace a thing by its equal.
    assert set(account.changes[seen:]) == {"PutMetricAlarm", "PutDashboard", "PutQueryDefinition"}


def test_destroy_leaves_what_others_made(account: Sent) -> None:
    for name in ("toy", "toy-2"):
        model().deploy(endpoint_name=name, instance_type=TYPE, max_instance_count=2)
    sagemaker, cloudwatch = client("sagemaker"), client("cloudwatch")
    sagemaker.create_model(ModelName="toy-0a1b2c3d", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "other:1"})
    cloudwatch.put_metric_alarm(
        AlarmName="kvreuse/toy/mine",
        MetricName="TTFT",
        Namespace="mine",
        Statistic="Sum",
        ComparisonOperator="GreaterThanThreshold",
        Threshold=1,
        Period=60,
        EvaluationPeriods=1,
    )
    assert main(["destroy", "toy"]) == 0
    left = everything()
    assert left["endpoints"] == ["toy-2"]
    assert left["targets"] == ["endpoint/toy-2/variant/main"]
    assert left["dashboards"] == ["kvreuse-toy-2"]
    assert "toy-0a1b2c3d" in left["models"]
    assert [name for name in left["alarms"] if not name.startswith("kvreuse/toy-2/")] == ["kvreuse/toy/mine"]
    assert {name.rpartition("/")[0] for name in left["queries"]} == {"kvreuse/toy-2"}
    assert len(left["configs"]) == 1


def test_destroy_leaves_a_dashboard_that_bears_the_name_but_not_the_mark(account: Sent) -> None:
    client("cloudwatch").put_dashboard(DashboardName="kvreuse-toy", DashboardBody='{"widgets": []}')
    assert main(["destroy", "toy"]) == 0
    assert everything()["dashboards"] == ["kvreuse-toy"]


def test_destroy_of_nothing_sends_nothing(account: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["destroy", "toy"]) == 0
    assert account.changes == []


@pytest.mark.parametrize("command", [["destroy", "toy"], ["deploy", "toy", *FLAGS]])
def test_an_endpoint_of_others_is_refused(
    account: Sent, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    sagemaker = client("sagemaker")
    sagemaker.create_model(ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "other:1"})
    fleet = {"VariantName": "v", "ModelName": "m", "InstanceType": TYPE, "InitialInstanceCount": 1}
    sagemaker.create_endpoint_config(EndpointConfigName="c", ProductionVariants=[fleet | {"InitialVariantWeight": 1}])
    sagemaker.create_endpoint(EndpointName="toy", EndpointConfigName="c")
    assert main(command) == 1
    assert "endpoint toy was not made by kvreuse deploy" in capsys.readouterr().err
    assert account.changes == []


def test_a_canary_comes_with_its_options_and_share_and_goes_without_a_trace(account: Sent) -> None:
    base = ["deploy", "toy", *FLAGS, "--option", "max_batch_size=4", "--max-instance-count=3"]
    assert main(base) == 0
    without = everything()
    change = ["--set", "option.kv_cache_memory_ratio=0.6"]
    assert main([*base, "--canary-weight", "0.01", *change]) == 0
    assert live("toy") == {"main": (1, 0.99), "canary": (1, 0.01)}
    found = variables("toy")
    assert "OPTION_KV_CACHE_MEMORY_RATIO" not in found["main"]
    assert found["canary"]["OPTION_KV_CACHE_MEMORY_RATIO"] == "0.6"
    assert found["canary"]["OPTION_MAX_BATCH_SIZE"] == "4"
    assert "kvreuse/toy/canary/oom" in everything()["alarms"]
    assert main(base) == 0
    assert live("toy") == {"main": (1, 1.0)}
    after = everything()
    assert after | {"configs": [], "models": []} == without | {"configs": [], "models": []}


def test_another_share_for_the_canary_keeps_the_instances(account: Sent) -> None:
    model().deploy(instance_type=TYPE, canary=Canary(weight=0.01))
    seen = len(account.changes)
    model().deploy(instance_type=TYPE, canary=Canary(weight=0.1))
    assert live("kvreuse") == {"main": (1, 0.9), "canary": (1, 0.1)}
    assert "UpdateEndpointWeightsAndCapacities" in account.changes[seen:]
    assert "UpdateEndpoint" not in account.changes[seen:]


def test_an_update_keeps_the_instances_that_autoscaling_added(account: Sent) -> None:
    model().deploy(instance_type=TYPE, max_instance_count=5)
    scaled = [{"VariantName": "main", "DesiredInstanceCount": 4, "DesiredWeight": 1.0}]
    client("sagemaker").update_endpoint_weights_and_capacities(
        EndpointName="kvreuse", DesiredWeightsAndCapacities=scaled
    )
    model(max_batch_size=4).deploy(instance_type=TYPE, max_instance_count=5)
    assert live("kvreuse") == {"main": (4, 1.0)}


def test_an_update_that_was_rolled_back_is_an_error(account: Sent) -> None:
    model().deploy(instance_type=TYPE)
    account.next_update_rolls_back = True
    with pytest.raises(DeployError, match="update of endpoint kvreuse was rolled back"):
        model(max_batch_size=4).deploy(instance_type=TYPE)
    model(max_batch_size=4).deploy(instance_type=TYPE)
    assert variables("kvreuse")["main"]["OPTION_MAX_BATCH_SIZE"] == "4"


def test_an_endpoint_that_failed_is_made_anew(account: Sent) -> None:
    model().deploy(instance_type=TYPE)
    account.set_status("kvreuse", "Failed")
    model().deploy(instance_type=TYPE)
    found = client("sagemaker").describe_endpoint(EndpointName="kvreuse")
    assert found["EndpointStatus"] == "InService"


def test_an_endpoint_that_is_being_changed_is_left_alone(account: Sent) -> None:
    model().deploy(instance_type=TYPE)
    account.set_status("kvreuse", "Updating")
    seen = len(account.changes)
    with pytest.raises(ConfigError, match="endpoint kvreuse is Updating"):
        model(max_batch_size=4).deploy(instance_type=TYPE)
    assert account.changes[seen:] == []


def test_a_dry_run_prints_exactly_what_is_then_sent(account: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["deploy", "toy", *FLAGS, "--max-instance-count", "2"]
    assert main([*command, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert account.changes == []
    assert main(command) == 0
    assert account.changes == [call["operation"] for call in planned]
    model_call = client("sagemaker").describe_model(ModelName=planned[0]["parameters"]["ModelName"])
    assert model_call["PrimaryContainer"] == planned[0]["parameters"]["PrimaryContainer"]


def test_a_refusal_of_aws_is_one_sentence_with_exit_code_1(account: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "toy", *FLAGS[:-1], "ml.unknown.xlarge"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvreuse: error: CreateEndpointConfig: ")
    assert "ml.unknown.xlarge" in error


def test_without_credentials_the_command_says_so(
    account: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    assert main(["destroy", "toy"]) == 1
    assert "Unable to locate credentials" in capsys.readouterr().err


def test_compare_puts_the_variants_side_by_side(account: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    model().deploy(endpoint_name="toy", instance_type=TYPE, canary=Canary(weight=0.1))
    at = datetime.now(UTC) - timedelta(minutes=5)
    for name, hit_rate in (("main", 0.5), ("canary", 0.75)):
        dimensions = [{"Name": "EndpointName", "Value": "toy"}, {"Name": "VariantName", "Value": name}]
        datum = {"MetricName": "KV_CACHE_HIT_RATE", "Dimensions": dimensions, "Value": hit_rate, "Timestamp": at}
        client("cloudwatch").put_metric_data(Namespace="kvreuse", MetricData=[datum])
    assert main(["compare", "toy", "--hours", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: values["hit_rate"] for name, values in found.items()} == {"main": 0.5, "canary": 0.75}
    assert found["main"]["ttft_p99_ms"] is None
    assert main(["compare", "toy"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [row[-1].strip() for row in rows[:3]] == ["canary", "-", "75.0%"]


def test_compare_of_an_endpoint_that_does_not_exist_is_refused(
    account: Sent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "toy"]) == 1
    assert capsys.readouterr().err == "kvreuse: error: there is no endpoint toy\n"


def test_saved_queries_name_fields_of_the_request_log(container: Container) -> None:
    start = "One letter is sorted into one of five drawers, and only the drawer is named. " * 6
    for text in (start + "alpha " * 40, start + "beta " * 40):
        assert container.post({"inputs": text, "parameters": {"max_new_tokens": 1}}).status_code == 200
    assert container.post({"inputs": 1}).status_code == 400
    fields = {name for line in container.log_lines() for name in line}
    queries = json.loads((FOLDER / "queries.json").read_text("utf-8"))
    text = re.sub(r"'\w+'", "", "\n".join(line for lines in queries.values() for line in lines))
    named = set(re.findall(r"[a-z]\w*_\w+|tier|event|error|status", text)) - {"hit_rate", "p50_ms", "p99_ms"}
    assert len(named) >= 8
    assert named <= fields
