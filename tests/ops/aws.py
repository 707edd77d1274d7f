"""A small AWS in this process for tests of deployments: moto's server, and what it lacks of the calls that are sent.

What is added keeps to the services' own rules: an update takes over the variants of the new configuration, a saved
query has an id and is replaced by it.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.request import Request, urlopen

import boto3
import botocore.session
from botocore.loaders import Loader
from botocore.model import ServiceModel, Shape
from moto.core.responses import ActionResult
from moto.logs.models import logs_backends
from moto.logs.responses import LogsResponse
from moto.sagemaker.models import sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer
from pytest import MonkeyPatch

from kvreuse.ops.deploy.resources import Call

__all__ = ["REGION", "ROLE", "Sent", "aws", "client", "limit_faults"]

REGION, ROLE = "eu-west-1", "arn:aws:iam::123456789012:role/kvreuse"
_READS = ("Describe", "List", "Get")
_loader = Loader()
_models: dict[str, ServiceModel] = {}


class Sent:
    """Every operation of every client that boto3 makes while it listens, in order."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.next_update_rolls_back = False

    @property
    def changes(self) -> list[str]:
        names = [operation.split(":")[1] for operation in self.operations]
        return [name for name in names if not name.startswith(_READS)]

    def set_status(self, endpoint_name: str, status: str) -> None:
        sagemaker_backends["123456789012"][REGION].endpoints[endpoint_name].endpoint_status = status

    def listen(self, monkeypatch: MonkeyPatch) -> None:
        make = boto3.Session.client

        def made_client(session: Any, *arguments: Any, **named: Any) -> Any:
            session._session.register_component("data_loader", _loader)  # models are large: each is read once
            made = make(session, *arguments, **named)
            made.meta.events.register("before-call", self._note)
            return made

        monkeypatch.setattr(boto3.Session, "client", made_client)

    def _note(self, model: Any, **_: Any) -> None:
        service = model.service_model.signing_name.replace("monitoring", "cloudwatch")
        self.operations.append(f"{service}:{model.name}")


@contextmanager
def aws(monkeypatch: MonkeyPatch) -> Iterator[Sent]:
    """An empty account that boto3 finds by itself."""
    sent = Sent()
    monkeypatch.setattr(SageMakerResponse, "update_endpoint", _update_endpoint(sent), raising=False)
    for method in (put_query_definition, describe_query_definitions, delete_query_definition):
        monkeypatch.setattr(LogsResponse, method.__name__, method, raising=False)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        given = {"ENDPOINT_URL": f"http://{host}:{port}", "DEFAULT_REGION": REGION}
        given |= {"ACCESS_KEY_ID": "none", "SECRET_ACCESS_KEY": "none", "CONFIG_FILE": "/dev/null"}
        for name, value in given.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        _reset(given["ENDPOINT_URL"])
        sent.listen(monkeypatch)
        yield sent
    finally:
        server.stop()


def client(service: str) -> Any:
    """A client that Sent does not listen to."""
    return _client(service, os.environ["AWS_ENDPOINT_URL"])


@cache
def _client(service: str, url: str) -> Any:
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader)
    return session.create_client(service, endpoint_url=url)


def _reset(url: str) -> None:
    with urlopen(Request(f"{url}/moto-api/reset", method="POST")) as answer:
        answer.read()
    _queries().clear()


def _update_endpoint(sent: Sent) -> Any:
    def update_endpoint(self: SageMakerResponse) -> ActionResult:
        backend = self.sagemaker_backend
        endpoint = backend.endpoints[self._get_param("EndpointName")]
        config = backend.describe_endpoint_config(self._get_param("EndpointConfigName"))
        if not sent.next_update_rolls_back:
            endpoint.endpoint_config_name = config["EndpointConfigName"]
            endpoint.production_variants = endpoint._process_production_variants(config["ProductionVariants"])
        sent.next_update_rolls_back = False
        return ActionResult({"EndpointArn": endpoint.arn})

    return update_endpoint


def _queries() -> dict[str, dict[str, Any]]:
    backend = logs_backends["123456789012"][REGION]
    found: dict[str, dict[str, Any]] = backend.__dict__.setdefault("query_definitions", {})
    return found


def put_query_definition(self: LogsResponse) -> str:
    query_id = self._get_param("queryDefinitionId") or str(uuid.uuid4())
    fields = ("name", "queryString", "logGroupNames")
    _queries()[query_id] = {"queryDefinitionId": query_id} | {name: self._get_param(name) for name in fields}
    return json.dumps({"queryDefinitionId": query_id})


def describe_query_definitions(self: LogsResponse) -> str:
    prefix = self._get_param("queryDefinitionNamePrefix") or ""
    return json.dumps({"queryDefinitions": [q for q in _queries().values() if q["name"].startswith(prefix)]})


def delete_query_definition(self: LogsResponse) -> str:
    return json.dumps({"success": _queries().pop(self._get_param("queryDefinitionId"), None) is not None})


def limit_faults(call: Call) -> list[str]:
    """What of a call the service's own model does not allow: names, types, limits, patterns, enumerations."""
    if call.service not in _models:
        _models[call.service] = ServiceModel(_loader.load_service_model(call.service, "service-2"), call.service)
    shape = _models[call.service].operation_model(call.operation).input_shape
    return list(_faults(call.parameters, shape, call.operation))


def _faults(value: Any, shape: Shape, path: str) -> Iterator[str]:
    kinds = {"structure": dict, "map": dict, "list": list, "string": str, "boolean": bool, "integer": int}
    if not isinstance(value, kinds.get(shape.type_name, int | float)) and shape.type_name != "timestamp":
        yield f"{path} is {value!r} and should be a {shape.type_name}"
        return
    if shape.type_name == "structure":
        yield from (f"{path}.{name} is missing" for name in shape.required_members if name not in value)
        for name, inner in value.items():
            if name not in shape.members:
                yield f"{path}.{name} is unknown"
            else:
                yield from _faults(inner, shape.members[name], f"{path}.{name}")
        return
    yield from _limit_faults(value, shape, path)
    if shape.type_name == "list":
        for number, inner in enumerate(value):
            yield from _faults(inner, shape.member, f"{path}[{number}]")
    elif shape.type_name == "map":
        for key, inner in value.items():
            yield from _faults(key, shape.key, f"{path} key")
            yield from _faults(inner, shape.value, f"{path}.{key}")


def _limit_faults(value: Any, shape: Shape, path: str) -> Iterator[str]:
    size = len(value) if isinstance(value, str | list | dict) else value
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if shape.type_name != "timestamp" and ((low is not None and size < low) or (high is not None and size > high)):
        yield f"{path} is {value!r}, allowed is {low} to {high}"
    if shape.metadata.get("enum") and value not in shape.metadata["enum"]:
        yield f"{path} is {value!r}, allowed is {shape.metadata['enum']}"
    if isinstance(value, str) and (pattern := _pattern(shape)) and not pattern.fullmatch(value):
        yield f"{path} is {value!r}, allowed is {pattern.pattern}"


def _pattern(shape: Shape) -> re.Pattern[str] | None:
    """Some patterns can be read by Java alone."""
    try:
        return re.compile(shape.metadata["pattern"]) if "pattern" in shape.metadata else None
    except re.error:
        return None
