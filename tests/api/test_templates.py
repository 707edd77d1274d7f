"""Frozen prefixes: registered templates and prefix + inputs, always one text that is tokenized at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvreuse.api import openai, sagemaker
from kvreuse.api.call import Chat, Rules
from kvreuse.api.templates import load_templates
from kvreuse.errors import ConfigError, RequestError

MANIFEST = """
- id: letter
  text: "A clerk answers {{ name }} in a {{tone}} voice. {{name}}!"
  variables: {tone: kind, name: nobody}
- id: support
  messages:
    - {role: system, content: "You help {{who}}."}
    - {role: user, content: [{type: text, text: "{{question}}"}]}
  variables: {date_string: 1 Jan 2026}
"""


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    path = tmp_path / "templates.yaml"
    path.write_text(MANIFEST, encoding="utf-8")
    return Rules(templates=load_templates(path), template_variables={"date_string": "today", "style": "plain"})


def prompt(rules: Rules, **body: Any) -> Any:
    (prompt,) = sagemaker.parse(body, rules=rules).prompts
    return prompt


def test_variables_fill_every_place_and_defaults_the_rest(rules: Rules) -> None:
    filled = prompt(rules, template="letter", variables={"name": "Ada"})
    assert filled == "A clerk answers Ada in a kind voice. Ada!"


def test_numbers_are_said_as_they_are(rules: Rules) -> None:
    assert "answers 7 in" in prompt(rules, template="letter", variables={"name": 7})


def test_what_a_variable_holds_is_not_searched_for_places(rules: Rules) -> None:
    filled = prompt(rules, template="letter", variables={"name": "{{tone}}", "tone": r"\1"})
    assert filled == r"A clerk answers {{tone}} in a \1 voice. {{tone}}!"


def test_a_template_of_messages_is_a_chat_whose_other_variables_reach_the_chat_template(rules: Rules) -> None:
    chat = prompt(rules, template="support", variables={"who": "us", "question": "Why?", "style": "loud"})
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == ["You help us.", "Why?"]
    assert chat.variables == {"date_string": "1 Jan 2026", "style": "loud"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"template": "unknown"}, "template"),
        ({"template": ["letter"]}, "template"),
        ({"template": "letter", "variables": {"nmae": "Ada"}}, "variables.nmae"),
        ({"template": "letter", "variables": {"name": ["Ada"]}}, "variables.name"),
        ({"template": "letter", "variables": {"name": True}}, "variables.name"),
        ({"template": "letter", "variables": {"name": "\ud800"}}, "variables.name"),
        ({"template": "letter", "variables": "Ada"}, "variables"),
        ({"template": "support", "variables": {"who": "us"}}, "variables.question"),
        ({"template": "letter", "inputs": "a"}, "template"),
        ({"template": "letter", "prefix": "a"}, "template"),
        ({"inputs": "a", "variables": {"name": "Ada"}}, "variables"),
        ({"inputs": "a", "prefix": 1}, "prefix"),
        ({"prefix": "a"}, "inputs"),
    ],
)
def test_what_cannot_be_filled_is_refused_by_name(rules: Rules, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        sagemaker.parse(body, rules=rules)
    assert refusal.value.param == param


def test_a_prefix_and_its_inputs_are_one_text() -> None:
    call = sagemaker.parse({"prefix": "Say ", "inputs": ["yes", 1, "no"]})
    assert call.prompts[0::2] == ("Say yes", "Say no")
    assert isinstance(call.prompts[1], RequestError)


@pytest.mark.parametrize("name", ["chat_template_kwargs", "variables"])
def test_a_chat_pins_template_variables_over_those_of_the_endpoint(rules: Rules, name: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    (chat,) = openai.parse_chat({"messages": messages, name: {"date_string": "then"}}, rules=rules).prompts
    assert isinstance(chat, Chat)
    assert chat.variables == {"date_string": "then", "style": "plain"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{a: 1}", "must hold a list"),
        ("- 1", "must hold a list"),
        ("- {id: a}", "text"),
        ("- {id: a, text: x, messages: [{role: user, content: x}]}", "text"),
        ("- {text: x}", "id"),
        ("- {id: a, text: x, txet: y}", "txet"),
        ("- {id: a, messages: [{role: nobody, content: x}]}", "role"),
        ("- {id: a, text: x, variables: {y: [1]}}", "variables.y"),
        ("- {id: a, text: x}\n- {id: a, text: y}", "twice"),
        ("- {id: a, text: 'x", "cannot read"),
        ("- !!python/object/apply:os.getcwd []", "cannot read"),
    ],
)
def test_a_bad_manifest_is_refused_in_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "templates.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason) as refusal:
        load_templates(path)
    assert "\n" not in refusal.value.message


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_templates(tmp_path / "nothing.yaml")


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "templates.json"
    path.write_text(json.dumps([{"id": "a", "text": "x\u00e9{{y}}"}]), encoding="utf-8")
    assert prompt(Rules(templates=load_templates(path)), template="a", variables={"y": "z"}) == "xéz"
