"""A chat template on trial: what it prints of the day, of the system prompt and of earlier reasoning.

Knows Jinja and messages. Knows nothing of tokens or of real prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvreuse.engine.tokenizer import RENDER_ERRORS
from kvreuse.errors import ConfigError
from kvreuse.ops.files import read_json, read_text
from kvreuse.ops.lint.checks import Finding

__all__ = ["ChatTemplate", "check_template", "plain"]

_DAYS = (datetime(2025, 1, 2, 3, 4, 5), datetime(2026, 11, 29, 17, 48, 59))
_SYSTEM, _ASK, _THOUGHT, _REPLY = "SYSTEM-PROMPT-MARK", "QUESTION-MARK", "THOUGHT-MARK", "REPLY-MARK"
_USER = {"role": "user", "content": _ASK}
_AGAIN = {"role": "user", "content": "SECOND-MARK"}
_SYSTEM_MESSAGE = {"role": "system", "content": _SYSTEM}
# How reasoning travels in a conversation: inside the text, or in a field of its own.
_THINKERS = (
    {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY}"},
    {"role": "assistant", "content": _REPLY, "reasoning_content": _THOUGHT, "thinking": _THOUGHT},
)


class ChatTemplate:
    """Renders as Transformers does, except that the day is ours. Raises ConfigError for a broken template."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is broken: {error}") from error

    @classmethod
    def load(cls, path: str) -> ChatTemplate:
        """From a .jinja file, a tokenizer_config.json, or a folder with either."""
        place = Path(path)
        if place.is_dir():
            found = [place / "chat_template.jinja", place / "tokenizer_config.json"]
            place = next(filter(Path.is_file, found), place)
            if place.is_dir():
                raise ConfigError(f"there is no chat template in {path}")
        if place.suffix == ".json":
            return cls(read_json(str(place)).get("chat_template") or "")
        return cls(read_text(str(place)))

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, moment: int = 0
    ) -> str:
        try:
            return self._template.render(
                messages=list(messages), tools=tools, add_generation_prompt=True, bos_token="<s>", eos_token="</s>",
                strftime_now=_DAYS[moment].strftime,
            )  # fmt: skip
        except RENDER_ERRORS as error:
            raise ConfigError(f"the chat template refuses these messages: {error}") from error

    def at(self, moment: int, messages: Sequence[Mapping[str, Any]]) -> str:
        """As it reads on the first or the second of two days; empty when it refuses the messages."""
        try:
            return self(messages, None, moment=moment)
        except ConfigError:
            return ""


def plain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """What stands for a template when none is given: the tools, then `role: content` lines."""
    head = [json.dumps(list(tools), ensure_ascii=False)] if tools else []
    return "\n".join([*head, *(f"{message.get('role')}: {message.get('content')}" for message in messages)])


def check_template(template: ChatTemplate) -> Iterator[Finding]:
    """What this template does to any conversation."""
    for messages in ([_USER], [_SYSTEM_MESSAGE, _USER]):
        one, other = template.at(0, messages), template.at(1, messages)
        if one != other:
            place = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            yield Finding(
                kind="template-date",
                advice="the chat template prints today's date: every prefix is new at midnight; pin it, for example "
                "with option.template_variables or a template whose date comes last",
                where=one[max(0, place - 30) : place + 12],
            )
            break
    yield from _system_moved(template)
    yield from _reasoning_dropped(template)


def _system_moved(template: ChatTemplate) -> Iterator[Finding]:
    reply = {"role": "assistant", "content": _REPLY}
    text = template.at(0, [_SYSTEM_MESSAGE, _USER, reply, _AGAIN])
    if 0 <= text.find(_ASK) < text.find(_SYSTEM):
        yield Finding(
            kind="system-last",
            advice="the chat template puts the system prompt into the last turn: nothing but the turns before it is "
            "shared; put shared instructions into the first user message",
        )


def _reasoning_dropped(template: ChatTemplate) -> Iterator[Finding]:
    for thinker in _THINKERS:
        later = template.at(0, [_USER, thinker, _AGAIN])
        # A field that no template knows is no reasoning; a thought taken out of the text was known for one.
        is_known = _THOUGHT in thinker["content"] or _THOUGHT in template.at(0, [_USER, thinker])
        if is_known and later and _THOUGHT not in later:
            yield Finding(
                kind="reasoning-dropped",
                advice="the chat template drops earlier reasoning from the history: the KV of an answer is of no use "
                "to the next turn, only what stood before the answer is shared",
            )
            return


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
