"""Reads what exists of an endpoint and sends the calls of a plan, through boto3.

Knows how AWS answers. Knows nothing of what is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from kvreuse.errors import KVReuseError
from kvreuse.ops.deploy import resources, watch
from kvreuse.ops.deploy.plan import Endpoint, Fleet, Observed
from kvreuse.ops.deploy.resources import Call, call

__all__ = ["Cloud", "DeployError"]

_WAIT = {"Delay": 15, "MaxAttempts": 1200}  # 5 hours: longer than an update may take


class DeployError(KVReuseError):
    """AWS refused a call, or the endpoint did not become what was asked for. Running the same command again goes on."""


class Cloud:
    """One account and region, through boto3's Session. Raises DeployError whenever AWS says no."""

    def __init__(self, session: Any = None) -> None:
        self._session = session or boto3.Session()
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        """boto3's client, made once."""
        with _faults_of(service):
            if service not in self._clients:
                self._clients[service] = self._session.client(service)
        return self._clients[service]

    def send(self, calls: Iterable[Call], *, say: Callable[[str], None] = lambda line: None) -> None:
        """Send them in order, and after each wait for what it names. `say` gets a line before each."""
        for sent in calls:
            names = [value for key, value in sent.parameters.items() if key.lower().endswith(("name", "resourceid"))]
            say(" ".join([sent.operation, *names[:1], *(["(and wait)"] if sent.wait else [])]))
            client = self.client(sent.service)
            with _faults_of(sent.operation):
                getattr(client, sent.method)(**sent.parameters)
                if sent.wait:
                    name = sent.parameters["EndpointName"]
                    client.get_waiter(sent.wait).wait(EndpointName=name, WaiterConfig=_WAIT)
            if sent.operation == "UpdateEndpoint":
                self._refuse_rollback(**sent.parameters)

    def read(self, asked: Call, key: str) -> list[Any]:
        """The items under `key` of all pages that a call answers with."""
        client = self.client(asked.service)
        with _faults_of(asked.operation):
            if client.can_paginate(asked.method):
                pages = client.get_paginator(asked.method).paginate(**asked.parameters)
            else:
                pages = [getattr(client, asked.method)(**asked.parameters)]
            return [item for page in pages for item in page[key]]

    def describe(self, endpoint_name: str) -> dict[str, Any] | None:
        """DescribeEndpoint's answer, None when there is no such endpoint."""
        return self._find("sagemaker", "describe_endpoint", EndpointName=endpoint_name)

    def observe(self, endpoint_name: str) -> Observed:
        """What exists now."""
        base, prefix = re.escape(resources.name_base(endpoint_name)), watch.alarm_prefix(endpoint_name)
        saved = call("logs", "DescribeQueryDefinitions", queryDefinitionNamePrefix=prefix)
        queries = {query["name"]: query["queryDefinitionId"] for query in self.read(saved, "queryDefinitions")}
        board = self._find("cloudwatch", "get_dashboard", DashboardName=watch.dashboard_name(endpoint_name))
        return Observed(
            region=self.client("sagemaker").meta.region_name,
            endpoint=self._endpoint(endpoint_name),
            models=self._named(endpoint_name, "Model", rf"{base}-\w{{8}}"),
            configs=self._named(endpoint_name, "EndpointConfig", rf"{base}-\w{{8}}-\w{{6}}"),
            alarms=self._alarms(endpoint_name, prefix),
            scaled=self._scaled(endpoint_name),
            dashboard=board["DashboardBody"] if board else None,
            queries=queries,
        )

    def _find(self, service: str, method: str, **parameters: str) -> dict[str, Any] | None:
        client = self.client(service)
        with _faults_of(method):
            try:
                found: dict[str, Any] = getattr(client, method)(**parameters)
            except ClientError as error:
                is_absent = re.search("not ?found|could not find|does not exist", str(error), re.IGNORECASE)
                if is_absent:
                    return None
                raise
        return found

    def _endpoint(self, name: str) -> Endpoint | None:
        found = self.describe(name)
        if found is None:
            return None
        config = self._find("sagemaker", "describe_endpoint_config", EndpointConfigName=found["EndpointConfigName"])
        made = (config or {}).get("ProductionVariants", [])
        types = {variant["VariantName"]: variant.get("InstanceType", "") for variant in made}
        fleets = {
            live["VariantName"]: Fleet(types.get(live["VariantName"], ""), live.get("DesiredInstanceCount", 0),
                                       live.get("DesiredWeight", 0.0))
            for live in found.get("ProductionVariants", [])
        }  # fmt: skip
        is_ours = self._is_tagged("sagemaker", found["EndpointArn"], name)
        return Endpoint(found["EndpointStatus"], found["EndpointConfigName"], is_ours, fleets)

    def _named(self, endpoint_name: str, kind: str, pattern: str) -> frozenset[str]:
        """Models or configurations that are ours; the pattern comes first, as each tag costs a call."""
        asked = call("sagemaker", f"List{kind}s", NameContains=resources.name_base(endpoint_name))
        arns = {item[f"{kind}Name"]: item[f"{kind}Arn"] for item in self.read(asked, f"{kind}s")}
        found = (name for name in arns if re.fullmatch(pattern, name))
        return frozenset(name for name in found if self._is_tagged("sagemaker", arns[name], endpoint_name))

    def _alarms(self, endpoint_name: str, prefix: str) -> frozenset[str]:
        asked = call("cloudwatch", "DescribeAlarms", AlarmNamePrefix=prefix, AlarmTypes=["MetricAlarm"])
        arns = {alarm["AlarmName"]: alarm["AlarmArn"] for alarm in self.read(asked, "MetricAlarms")}
        return frozenset(name for name in arns if self._is_tagged("cloudwatch", arns[name], endpoint_name))

    def _is_tagged(self, service: str, arn: str, endpoint_name: str) -> bool:
        asked = call("sagemaker", "ListTags", ResourceArn=arn)
        if service == "cloudwatch":
            asked = call("cloudwatch", "ListTagsForResource", ResourceARN=arn)
        return resources.tags(endpoint_name)[0] in self.read(asked, "Tags")

    def _scaled(self, endpoint_name: str) -> frozenset[str]:
        """Whoever registered them: a target dies with its variant."""
        prefix = resources.scalable_id(endpoint_name, "")["ResourceId"]
        asked = call("application-autoscaling", "DescribeScalableTargets", ServiceNamespace="sagemaker")
        names = [str(target["ResourceId"]) for target in self.read(asked, "ScalableTargets")]
        return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def _refuse_rollback(self, *, EndpointName: str, EndpointConfigName: str, **_: object) -> None:
        """An update that was rolled back ends in service as well, but with the old configuration."""
        found = self.describe(EndpointName) or {}
        if found.get("EndpointConfigName") != EndpointConfigName:
            reason = found.get("FailureReason", "an alarm went off or the new instances were not healthy")
            raise DeployError(
                f"the update of endpoint {EndpointName} was rolled back: {reason}\nhint: see its alarms and its log"
            )


@contextmanager
def _faults_of(what: str) -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        reason = getattr(error, "last_response", {}).get("FailureReason")  # of a wait that ended badly
        raise DeployError(f"{what}: {reason or error}") from error
