"""response_format: which schema an answer must meet, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvreuse.api import openai
from kvreuse.errors import RequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, None),
        (None, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}, SCHEMA),
    ],
)
def test_each_format_has_its_schema_in_both_openai_schemas(wanted: Any, schema: Any) -> None:
    assert openai.parse_chat(CHAT | {"response_format": wanted}).json_schema == schema
    assert openai.parse_completion({"prompt": "a", "response_format": wanted}).json_schema == schema


NO_SCHEMA = {"type": "json_schema", "json_schema": {"schema": 1}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": NO_SCHEMA}, "response_format.json_schema.schema"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_a_bad_format_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        openai.parse_chat(CHAT | body)
    assert refusal.value.param == param
