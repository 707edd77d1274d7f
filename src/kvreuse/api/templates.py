"""Registered prompt templates: read from a manifest, filled with a request's variables.

Knows {{name}} and where it may stand. Knows nothing of tokens: a filled template is tokenized as one text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from kvreuse.api.call import Chat, Prompt, Rules, Template
from kvreuse.api.fields import Fields, check_text, is_number
from kvreuse.api.openai import read_messages
from kvreuse.errors import ConfigError, RequestError

__all__ = ["fill", "load_templates", "samples"]

_PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def load_templates(path: Path | str, *, text: str | None = None) -> dict[str, Template]:
    """Templates by id: a list of objects with `id`, `text` or `messages`, `variables` (defaults), and how to warm them.

    YAML, of which JSON is a part. text: the manifest itself, where `path` is only its name. Raises ConfigError in one
    sentence.
    """
    try:
        items = yaml.safe_load(Path(path).read_text(encoding="utf-8") if text is None else text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot read the templates of {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{path} must hold a list of templates")
    templates: dict[str, Template] = {}
    for number, item in enumerate(items):
        try:
            name, template = _template(Fields(item, where=f"template {number}"))
        except RequestError as error:
            raise ConfigError(f"{error.message}, in {path}") from None
        if name in templates:
            raise ConfigError(f"template {name!r} is given twice in {path}")
        templates[name] = template
    return templates


def _template(fields: Fields) -> tuple[str, Template]:
    fields.refuse_unknown(("id", "text", "messages", "variables", "tenant", "priority", "pin", "ttl_s"))
    name = check_text(fields.values.get("id"), param=fields.param("id"))
    text, messages = fields.values.get("text"), fields.values.get("messages")
    if (text is None) == (messages is None):
        raise fields.error("text", "given, or else messages")
    body = read_messages(messages) if text is None else check_text(text, param=fields.param("text"))
    variables = fields.mapping("variables")
    return name, Template(
        body=body,
        variables={key: _said(key, value) for key, value in variables.items()},
        tenant=check_text(fields.values.get("tenant", ""), param=fields.param("tenant")),
        priority=fields.integer("priority", default=0, low=-1000, high=1000),
        pin=fields.flag("pin", default=False),
        ttl_s=fields.number("ttl_s", default=None, low=1, high=10**9),
    )


def fill(name: object, variables: Mapping[str, object], *, rules: Rules) -> Prompt:
    """The prompt of template `name`. Raises RequestError 400: an unknown template, a variable missing or unknown.

    Variables that no place of a messages template takes go to the model's chat template.
    """
    template = rules.templates.get(name) if isinstance(name, str) else None
    if template is None:
        known = ", ".join(rules.templates) or "none"
        raise RequestError(f"template must be one of those registered here: {known}", param="template")
    values = {**template.variables, **variables}
    body = template.body
    texts = _texts(body)
    places = _places(texts)
    for place in sorted(places):
        values[place] = _said(place, values.get(place))
    filled = [_PLACE.sub(lambda match: str(values[match[1]]), text) for text in texts]
    others = {key: value for key, value in values.items() if key not in places}
    if not isinstance(body, str):
        messages = [{**message, "content": text} for message, text in zip(body, filled, strict=True)]
        return Chat(messages=messages, variables={**rules.template_variables, **others})
    Fields(others, where="variables").refuse_unknown(places)
    return filled[0]


def samples(name: str, *, rules: Rules) -> tuple[Prompt, Prompt]:
    """Two prompts of template `name` that differ in every variable from its first character on."""
    places = _places(_texts(rules.templates[name].body))
    one, other = (fill(name, dict.fromkeys(places, character), rules=rules) for character in "0Z")
    return one, other


def _texts(body: str | Sequence[Mapping[str, object]]) -> list[str]:
    return [body] if isinstance(body, str) else [str(message.get("content") or "") for message in body]


def _places(texts: Sequence[str]) -> set[str]:
    return {place for text in texts for place in _PLACE.findall(text)}


def _said(name: str, value: object) -> str:
    return str(value) if is_number(value) else check_text(value, param=f"variables.{name}")
