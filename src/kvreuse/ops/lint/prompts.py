"""Reads prompts from files in the shapes in which people keep them, and cuts text into tokens.

Knows JSON lines and tokenizers. Knows nothing of what makes a prompt good.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvreuse.errors import ConfigError
from kvreuse.ops.bench.workload import load_tokenizer

__all__ = ["Prompt", "Render", "Splitter", "read_prompts", "splitter"]

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
# text -> (one value per token, where each token ends in the text)
Splitter = Callable[[str], tuple[list[int | str], list[int]]]

_WORDS = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\w\s]+|\s+|_+")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as the model reads it; of a conversation only up to its first question: what is said later differs by
    nature. `messages` (all of them) and `tools` are empty for plain text.
    """

    text: str
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    record: Mapping[str, Any] | None = None


def read_prompts(records: Iterable[Any], *, render: Render) -> list[Prompt]:
    """A prompt per record: a string, or an object with inputs, prompt, text or messages (beside them tools), or one
    that holds such an object as its body. Raises ConfigError for any other.
    """
    return [prompt for number, record in enumerate(records, 1) for prompt in _prompts(record, number, render)]


def splitter(tokenizer: str | None) -> Splitter:
    """By a tokenizer (demo, or a folder that holds tokenizer.json); None estimates: words, digits, punctuation."""
    if tokenizer is None:
        return _estimate
    backend = load_tokenizer(tokenizer)

    def split(text: str) -> tuple[list[int | str], list[int]]:
        encoding = backend.encode(text)
        return list(encoding.ids), [end for _, end in encoding.offsets]

    return split


def _estimate(text: str) -> tuple[list[int | str], list[int]]:
    found = list(_WORDS.finditer(text))
    return [match[0] for match in found], [match.end() for match in found]


def _prompts(record: Any, number: int, render: Render) -> list[Prompt]:
    fields = record
    for name in ("body", "request", "data"):
        if isinstance(fields, Mapping) and isinstance(fields.get(name), Mapping):
            fields = fields[name]
    if isinstance(fields, str):
        return [Prompt(fields)]
    if isinstance(fields, Mapping):
        origin = record if isinstance(record, Mapping) else None
        messages, tools = fields.get("messages"), fields.get("tools") or ()
        if isinstance(messages, list) and messages:
            asked = next((i for i, message in enumerate(messages, 1) if message.get("role") == "user"), len(messages))
            return [Prompt(render(messages[:asked], tools or None), messages, tools, origin)]
        for name in ("inputs", "prompt", "text"):
            texts = fields.get(name)
            if isinstance(texts, str | list):
                return [Prompt(str(text), record=origin) for text in ([texts] if isinstance(texts, str) else texts)]
    raise ConfigError(f"record {number} has no prompt: allowed are text, inputs, prompt or messages")
