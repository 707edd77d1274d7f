"""One HTTP body, understood: what to compute and how to say the answer.

Knows prompts and answers as values. Knows nothing of JSON field names, tokens or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from kvreuse.errors import KVReuseError, RequestError
from kvreuse.types import Delta, Done, SamplingParams

__all__ = ["Call", "Chat", "Meta", "Prompt", "Result", "Rules", "Template", "View"]

# What became of one prompt: its answer, or the fault that is its alone.
Result = Done | KVReuseError


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Messages for the model's chat template. `variables` are further template variables."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] | None = None


# Text, token ids, messages; or the reason why this item of a list cannot be one.
Prompt = str | tuple[int, ...] | Chat | RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A registered prompt: text, or messages for the model's chat template, with {{name}} where variables go.

    tenant, priority, pin, ttl_s: whose it is when it is warmed, in which order, whether eviction may take it, and for
    how long it is kept warm (None: always).
    """

    body: str | Sequence[Mapping[str, object]]
    variables: Mapping[str, object] = field(default_factory=dict)
    tenant: str = ""
    priority: int = 0
    pin: bool = False
    ttl_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What an endpoint allows and what it adds to its callers' bodies."""

    max_n: int = 16
    template_variables: Mapping[str, object] = field(default_factory=dict)
    templates: Mapping[str, Template] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What an answer says beside the text. `created` is in Unix seconds; `token_text` spells one token."""

    request_id: str
    model: str
    created: int
    token_text: Callable[[int], str]


class View(Protocol):
    """How one schema says its answer. One instance per call, used by one thread at a time.

    is_openai: an error has OpenAI's shape.
    """

    is_openai: ClassVar[bool]

    def answer(self, results: Sequence[Result], meta: Meta) -> object:
        """The JSON value of a whole answer, one result per prompt, in order."""

    def delta(self, prompt: int, event: Delta, meta: Meta) -> Sequence[object]:
        """The stream objects for new text of prompt number `prompt`."""

    def last(self, results: Sequence[Result], meta: Meta) -> Sequence[object]:
        """The terminal stream objects; a str is sent as it is. Facts and usage are in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """`prompts` share the rest. `max_prompt_tokens` keeps only that many tokens from the end of each prompt.

    `is_length_open`: the caller set no length, so max_new_tokens shrinks to what the model still holds.
    `json_schema`: what the answer must be an instance of.
    """

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    view: View
    is_stream: bool = False
    reuse: bool = True
    max_prompt_tokens: int | None = None
    is_length_open: bool = False
    json_schema: Mapping[str, object] | None = None
