"""docs/openapi.yaml says what the code does: its routes, its fields, and what schemathesis makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, response_schema_conformance
from serving import Container

from kvreuse.api import openai, sagemaker
from kvreuse.server.app import ROUTES

DOCUMENT: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "docs" / "openapi.yaml").read_text("utf-8"))
SCHEMAS = DOCUMENT["components"]["schemas"]
LENGTHS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
# Rules that no schema says: fields that go together only in some ways, and what the model's vocabulary or template,
# the registered templates or the installed extras allow.
BEYOND_SCHEMA = {
    *("stream", "top_logprobs", "best_of", "prompt", "template", "variables", "messages", "response_format"),
    *("chat_template_kwargs", "tools", "inputs", "ignore_eos", "stop_token_ids", "parameters.stop_token_ids"),
}
CHECKED = [not_a_server_error, negative_data_rejection, response_schema_conformance]


def test_the_document_has_every_route() -> None:
    documented = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert documented == set(ROUTES)


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (["Chat"], (*openai.CHAT, *openai.IGNORED)),
        (["Completion"], (*openai.COMPLETION, *openai.IGNORED)),
        (["Parameters"], sagemaker.PARAMETERS),
        (["Inputs", "Filled"], sagemaker.TOP_LEVEL),
    ],
)
def test_the_document_has_every_field(names: list[str], fields: tuple[str, ...]) -> None:
    documented = {field for name in names for field in SCHEMAS[name]["properties"]}
    assert documented == set(fields)
    assert all(SCHEMAS[name]["additionalProperties"] is False for name in names)


schema = schemathesis.openapi.from_dict(DOCUMENT)
schema.config.phases.update(phases=["fuzzing"])


@schema.hook
def map_body(context: Any, body: Any) -> Any:
    """The same in validity, but short to compute."""
    if not isinstance(body, dict):
        return body
    is_inputs = "inputs" in body or "template" in body
    if is_inputs and body.get("parameters") is None:
        body = body | {"parameters": {}}
    fields = body["parameters"] if is_inputs else body
    if isinstance(fields, dict):
        for name in LENGTHS[:1] if is_inputs else LENGTHS[1:2] if "prompt" in body else LENGTHS[1:]:
            if fields.get(name) is None or _is_within(fields[name], 1_000_000):
                fields[name] = 2
        for name in ("n", "num_return_sequences", "best_of"):
            if _is_within(fields.get(name), 16):
                fields[name] = 1
    return body


def _is_within(value: Any, most: int) -> bool:
    return type(value) in (int, float) and 1 <= value <= most and value == int(value)


@schema.include(method="POST", path_regex="^/(invocations|v1/)").parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # an example that fails is short enough
    suppress_health_check=list(HealthCheck),
)
def test_what_the_document_allows_is_answered_and_what_it_forbids_refused(
    case: schemathesis.Case, container: Container
) -> None:
    response = case.call(base_url=container.url, timeout=60)
    case.validate_response(response, checks=CHECKED)
    if response.status_code != 200:
        error = response.json()["error"]
        assert response.status_code in (400, 415, 422)
        assert "Traceback" not in response.text
        if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
            assert str(error["param"]).split("[")[0] in BEYOND_SCHEMA, error
