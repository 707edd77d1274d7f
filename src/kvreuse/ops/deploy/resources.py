"""A call to AWS as a value, and those that make models, configurations, endpoints and their scaling.

Knows SageMaker's shapes, and gives names that say the content. Knows nothing of what exists already; sends nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from botocore import xform_name

from kvreuse.ops.deploy.settings import Hosting, Source, Variant

__all__ = ["Call", "call", "create_config", "create_endpoint", "create_model", "dimensions", "name_base", "policy",
           "scalable_id", "scale", "shape_prefix", "tags", "update_endpoint"]  # fmt: skip

_GPU_TYPE, _GPU_AMI = re.compile(r"ml\.[gp]\d"), "al2023-ami-sagemaker-inference-gpu-4-1"
_MAX_NAME, _DIGEST, _NUMBERS_DIGEST = 63, 8, 6  # characters
_UPDATE_TIMEOUT_S = 14_400
_BUSY_METRIC = "SageMakerVariantConcurrentRequestsPerModelHighResolution"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request. `operation` is spelled as in IAM (CreateModel); `wait` names boto3's waiter for its end, if any."""

    service: str
    operation: str
    parameters: Mapping[str, Any]
    wait: str = ""

    @property
    def method(self) -> str:
        """Of a boto3 client."""
        return str(xform_name(self.operation))

    def shown(self) -> dict[str, Any]:
        """The call as JSON can carry it."""
        shown = {"service": self.service, "operation": self.operation, "parameters": self.parameters}
        return shown | ({"wait": self.wait} if self.wait else {})


def call(service: str, operation: str, *, wait: str = "", **parameters: Any) -> Call:
    """A call with these parameters; those that are None are left out."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return Call(service=service, operation=operation, parameters=given, wait=wait)


def tags(endpoint_name: str) -> list[dict[str, str]]:
    """What marks a resource as made for this endpoint."""
    return [{"Key": "kvreuse:endpoint", "Value": endpoint_name}]


def name_base(endpoint_name: str) -> str:
    """The start of the names of its models and configurations, with room for two digests after it."""
    return endpoint_name[: _MAX_NAME - _DIGEST - _NUMBERS_DIGEST - 2].rstrip("-")


def policy(endpoint_name: str, *, role: str) -> dict[str, Any]:
    """The IAM policy of who deploys, destroys and compares this endpoint. `role` is what SageMaker may be given."""
    text = Template(Path(__file__).with_name("policy.json").read_text("utf-8"))
    names = {"endpoint": endpoint_name, "base": name_base(endpoint_name), "role": role, "partition": role.split(":")[1]}
    document: dict[str, Any] = json.loads(text.substitute(names))
    return document


def create_model(source: Source, hosting: Hosting, variant: Variant) -> Call:
    """A model never changes: other content is another name."""
    data = {"S3Uri": source.model_data.rstrip("/") + "/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    container = {"Image": source.image_uri, "ModelDataSource": {"S3DataSource": data},
                 "Environment": dict(variant.environment)}  # fmt: skip
    content: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": source.role,
                               "VpcConfig": source.vpc_config}  # fmt: skip
    name = f"{name_base(hosting.endpoint_name)}-{_digest(content)[:_DIGEST]}"
    return call("sagemaker", "CreateModel", ModelName=name, **content, Tags=tags(hosting.endpoint_name))


def create_config(hosting: Hosting, fleets: Sequence[tuple[Variant, str]]) -> Call:
    """fleets: each variant with the name of its model.

    The name ends in two digests: of what only new instances can change, and of the numbers that running ones can take.
    """
    shapes = [_shape(hosting, variant, model_name) for variant, model_name in fleets]
    numbers = [{"InitialInstanceCount": fleet.count, "InitialVariantWeight": fleet.weight} for fleet, _ in fleets]
    digests = f"{_digest(shapes)[:_DIGEST]}-{_digest(numbers)[:_NUMBERS_DIGEST]}"
    return call(
        "sagemaker",
        "CreateEndpointConfig",
        EndpointConfigName=f"{name_base(hosting.endpoint_name)}-{digests}",
        ProductionVariants=[shape | extra for shape, extra in zip(shapes, numbers, strict=True)],
        Tags=tags(hosting.endpoint_name),
    )


def shape_prefix(config_name: str) -> str:
    """Equal for configurations that differ in instance counts and weights alone."""
    return config_name[:-_NUMBERS_DIGEST]


def create_endpoint(endpoint_name: str, config_name: str) -> Call:
    """The endpoint, until it is in service."""
    named = {"EndpointName": endpoint_name, "EndpointConfigName": config_name}
    return call("sagemaker", "CreateEndpoint", wait="endpoint_in_service", **named, Tags=tags(endpoint_name))


def update_endpoint(hosting: Hosting, config_name: str, *, alarms: Iterable[str], smallest_fleet: int) -> Call:
    """Blue/green: a new fleet, traffic moved to it, `bake_s` under watch, and back when one of `alarms` goes off.

    alarms: none where the variants' names change, for AWS then takes no deployment configuration.
    """
    # A quarter of the new instances first, as their stores are cold; AWS allows at most half, so one has no part.
    traffic: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0}
    if smallest_fleet >= 2:
        size = {"Type": "INSTANCE_COUNT", "Value": max(1, smallest_fleet // 4)}
        traffic = {"Type": "CANARY", "WaitIntervalInSeconds": hosting.bake_s, "CanarySize": size}
    steps = {"TrafficRoutingConfiguration": traffic, "TerminationWaitInSeconds": hosting.bake_s,
             "MaximumExecutionTimeoutInSeconds": _UPDATE_TIMEOUT_S}  # fmt: skip
    guards = {"Alarms": [{"AlarmName": name} for name in alarms]}
    guarded = {"BlueGreenUpdatePolicy": steps, "AutoRollbackConfiguration": guards}
    named = {"EndpointName": hosting.endpoint_name, "EndpointConfigName": config_name}
    config = guarded if guards["Alarms"] else None
    return call("sagemaker", "UpdateEndpoint", wait="endpoint_in_service", **named, DeploymentConfig=config)


def dimensions(endpoint_name: str, variant_name: str) -> list[dict[str, str]]:
    """Of every metric of a variant."""
    return [{"Name": "EndpointName", "Value": endpoint_name}, {"Name": "VariantName", "Value": variant_name}]


def scalable_id(endpoint_name: str, variant_name: str) -> dict[str, str]:
    """How Application Auto Scaling names a variant."""
    resource = f"endpoint/{endpoint_name}/variant/{variant_name}"
    dimension = "sagemaker:variant:DesiredInstanceCount"
    return {"ServiceNamespace": "sagemaker", "ResourceId": resource, "ScalableDimension": dimension}


def scale(hosting: Hosting, variant: Variant) -> list[Call]:
    """Target tracking. By default instances are added when batches are three quarters full, so that few wait."""
    target = scalable_id(hosting.endpoint_name, variant.name)
    tracked: dict[str, Any] = {
        "TargetValue": hosting.autoscaling_target or 0.75 * variant.config.max_batch_size,
        "PredefinedMetricSpecification": {"PredefinedMetricType": _BUSY_METRIC},
    }
    if hosting.autoscaling_metric == "gpu":
        own = dimensions(hosting.endpoint_name, variant.name)
        metric = {"Namespace": "/aws/sagemaker/Endpoints", "MetricName": "GPUUtilization", "Dimensions": own}
        tracked = {
            "TargetValue": hosting.autoscaling_target or 60.0,
            "CustomizedMetricSpecification": metric | {"Statistic": "Average"},
        }
    cooldowns = {"ScaleOutCooldown": hosting.scale_out_cooldown_s, "ScaleInCooldown": hosting.scale_in_cooldown_s}
    how: dict[str, Any] = {"PolicyName": f"kvreuse-{variant.name}", "PolicyType": "TargetTrackingScaling",
                           "TargetTrackingScalingPolicyConfiguration": tracked | cooldowns}  # fmt: skip
    service, fewest, most = "application-autoscaling", variant.min_count, variant.max_count
    return [
        call(service, "RegisterScalableTarget", **target, MinCapacity=fewest, MaxCapacity=most),
        call(service, "PutScalingPolicy", **target, **how),
    ]


def _shape(hosting: Hosting, variant: Variant, model_name: str) -> dict[str, Any]:
    """What of a production variant only new instances can change."""
    threshold = hosting.prefix_concurrency or min(1024, variant.config.max_batch_size)
    prefix = {"PrefixLength": hosting.prefix_length_bytes, "ConcurrencyThreshold": threshold}
    by_prefix = {"RoutingStrategy": "PREFIX_AWARE", "PrefixAwareRoutingConfig": prefix}
    gpu_ami = _GPU_AMI if _GPU_TYPE.match(hosting.instance_type) else None
    shape = {
        "VariantName": variant.name,
        "ModelName": model_name,
        "InstanceType": hosting.instance_type,
        "InferenceAmiVersion": hosting.inference_ami_version or gpu_ami,
        "VolumeSizeInGB": hosting.volume_size_gb,
        "ModelDataDownloadTimeoutInSeconds": hosting.download_timeout_s,
        "ContainerStartupHealthCheckTimeoutInSeconds": hosting.startup_timeout_s,
        "RoutingConfig": by_prefix if variant.max_count >= 2 else None,
    }
    return {name: value for name, value in shape.items() if value is not None}


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
