"""What parts near-duplicate prompts although the same text follows, and requests that undo their own history.

Knows texts, tokens and block sizes. Knows nothing of files or servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from operator import eq
from typing import Any

from kvreuse.ops.lint.prompts import Prompt, Splitter

__all__ = ["Finding", "Group", "check_conversations", "check_group"]

_MAX_COMPARED, _MAX_TOKENS = 6, 4000  # a diff is quadratic
_MIN_RUN = 4  # equal tokens between two differences that make them two
_REACH = 24  # characters around a difference that may belong to the same date or id
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DATE = re.compile(
    rf"\d{{4}}-\d\d?-\d\d?(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?Z?)?|\d\d?[./]\d\d?[./]\d{{2,4}}|\d\d?:\d\d(?::\d\d)?"
    rf"|{_MONTH}\.? \d\d?(?:st|nd|rd|th)?(?:,? \d{{4}})?|\d\d? {_MONTH}\.?(?: \d{{4}})?"
    r"|(?:mon|tues|wednes|thurs|fri|satur|sun)day",
    re.IGNORECASE,
)
_ID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b(?=\w*\d)[0-9a-f]{8,}\b|\d{5,}"
    r"|\b(?:\w+[_ -]?id|request|session|trace|ticket|run|nonce|seed|build|version)\b['\"]?[\s:=#]{1,3}['\"]?[\w-]+",
    re.IGNORECASE,
)
_ADVICE = {
    "whitespace": "the same text is spaced differently: strip and join it in one way",
    "json-key-order": "a JSON object is written with its keys in changing order: dump it with sorted keys",
    "list-order": "the same list, such as the tools, comes in changing order: sort it by name",
    "date": "a date or time stands before shared text: move it to the end, or write no more than the caller needs",
    "id": "an id stands before shared text: move it to the end or leave it out",
    "variable": "a variable stands before shared text: put the text that all share first and the variables last",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault. at_token: where prompts part because of it; saves_tokens: prompt tokens that mending it would hit."""

    kind: str
    advice: str
    where: str = ""
    group: int | None = None
    at_token: int | None = None
    saves_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Near-duplicates. shared_tokens: tokens from the start that all have; next_texts: how two of them go on."""

    number: int
    num_prompts: int
    shared_tokens: int
    next_texts: list[str]


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt cut into tokens."""

    prompt: Prompt
    tokens: list[int | str]
    ends: list[int]

    def at(self, token: int) -> int:
        """Where a token begins in the text."""
        return self.ends[token - 1] if token else 0


@dataclass(frozen=True, slots=True)
class _Difference:
    """Characters [start, end) of each text, and how many equal tokens follow in runs."""

    first: tuple[int, int]
    second: tuple[int, int]
    at_token: int
    shared_after: int


def check_group(
    number: int, prompts: Sequence[Prompt], *, split: Splitter, block_size: int
) -> tuple[Group, list[Finding]]:
    """The group as it is, and what keeps its members from sharing more. One finding of a kind."""
    texts = [_Text(prompt, *split(prompt.text)) for prompt in prompts]
    first, others = texts[0], texts[1:]
    shared = sorted(_common(first, other) for other in others)
    findings: dict[str, Finding] = {}
    for other in others[:: max(1, len(others) // _MAX_COMPARED)][:_MAX_COMPARED]:
        for difference in _differences(first, other):
            if difference.shared_after < block_size:
                continue
            kind, where = _classify(first, other, difference)
            saves = difference.shared_after // block_size * block_size * len(others)
            findings.setdefault(kind, Finding(kind=kind, advice=_ADVICE[kind], where=where, group=number,
                                              at_token=difference.at_token, saves_tokens=saves))  # fmt: skip
    found = list(findings.values())
    if not found:
        found += _check_blocks(number, shared[len(shared) // 2], len(others), block_size)
    least = min(others, key=lambda other: _common(first, other))
    next_texts = [text.prompt.text[text.at(shared[0]) :][:_REACH] for text in (first, least)]
    return Group(number=number, num_prompts=len(texts), shared_tokens=shared[0], next_texts=next_texts), found


def check_conversations(prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Requests that change what earlier requests of their conversation have said. One finding of a kind."""
    histories: dict[str, Sequence[Mapping[str, Any]]] = {}
    found: set[str] = set()
    for prompt in prompts:
        roles = [message.get("role") for message in prompt.messages]
        if "system" in roles[1:] and roles[0] != "system":
            found.add("system-last")
        asked = next((str(m.get("content")) for m in prompt.messages if m.get("role") == "user"), None)
        if asked is None:
            continue
        for before, now in zip(histories.get(asked, ()), prompt.messages, strict=False):
            if before != now and _thinks(before) and not _thinks(now):
                found.add("reasoning-dropped")
        histories[asked] = prompt.messages
    if "system-last" in found:
        yield Finding(kind="system-last", advice="a system message stands behind other turns: put it first")
    if "reasoning-dropped" in found:
        yield Finding(kind="reasoning-dropped", advice="earlier reasoning is taken out of the history: keep it, or "
                      "never send it, so that the next turn begins with what this one said")  # fmt: skip


def _thinks(message: Mapping[str, Any]) -> bool:
    return "<think>" in str(message.get("content")) or bool(message.get("reasoning_content"))


def _common(first: _Text, other: _Text) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, first.tokens, other.tokens)))


def _differences(first: _Text, other: _Text) -> Iterator[_Difference]:
    """Where the two part, differences with hardly anything between them joined."""
    a, b = first.tokens[:_MAX_TOKENS], other.tokens[:_MAX_TOKENS]
    found = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    runs = [run for run in found if run.size >= _MIN_RUN or run.a == run.b == 0]
    after = sum(run.size for run in runs if run.size >= 2 * _MIN_RUN)
    at_a = at_b = 0
    for run in runs:
        if run.a > at_a or run.b > at_b:
            spans = (first.at(at_a), first.at(run.a)), (other.at(at_b), other.at(run.b))
            yield _Difference(*spans, at_token=at_a, shared_after=after)
        after -= run.size if run.size >= 2 * _MIN_RUN else 0
        at_a, at_b = run.a + run.size, run.b + run.size


def _classify(first: _Text, other: _Text, at: _Difference) -> tuple[str, str]:
    """The kind of fault and the text that shows it."""
    a, b = first.prompt.text, other.prompt.text
    seen = a[max(0, at.first[0] - _REACH) : at.first[1] + _REACH]
    if "".join(a[slice(*at.first)].split()) == "".join(b[slice(*at.second)].split()):
        return "whitespace", seen
    kind = _order_kind(first.prompt.tools, other.prompt.tools) or _json_kind(a, b, at)
    if kind is not None:
        return kind, seen
    for name, pattern in (("date", _DATE), ("id", _ID)):
        if _covers(pattern, a, at.first) and _covers(pattern, b, at.second):
            return name, seen
    return "variable", seen


def _covers(pattern: re.Pattern[str], text: str, span: tuple[int, int]) -> bool:
    """Whether a match reaches into the difference. A difference of nothing touches what it stands in."""
    begin = max(0, span[0] - _REACH)
    found = pattern.finditer(text, begin, span[1] + _REACH)
    return any(match.start() <= span[1] and match.end() >= span[0] for match in found)


def _json_kind(a: str, b: str, at: _Difference) -> str | None:
    """Whether the difference lies in a JSON value that is the same in both but for its order."""
    for (start, end, value), (_, _, other) in zip(_json_values(a), _json_values(b), strict=False):
        if start <= at.first[1] and at.first[0] <= end and (kind := _order_kind(value, other)):
            return kind
    return None


def _json_values(text: str) -> Iterator[tuple[int, int, Any]]:
    """(start, end, value) of the outermost objects and arrays in a text, in order."""
    decoder, end = json.JSONDecoder(), 0
    for opening in re.finditer(r"[\[{]", text):
        if opening.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, opening.start())
        except ValueError:
            continue
        yield opening.start(), end, value


def _order_kind(one: Any, other: Any) -> str | None:
    if json.dumps(one) == json.dumps(other) or not one:
        return None
    if one == other:
        return "json-key-order"
    return "list-order" if _sorted(one) == _sorted(other) else None


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _sorted(item) for name, item in value.items()}
    if isinstance(value, list):
        return sorted((_sorted(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


def _check_blocks(number: int, shared: int, num_others: int, block_size: int) -> Iterator[Finding]:
    """Reuse comes in whole blocks: too much of a short shared part may lie behind the last one."""
    if shared < _MIN_RUN or shared % block_size <= 0.3 * shared:
        return
    smaller = next((size for size in (32, 16, 8, 4, 2) if size < block_size and shared % size <= 0.1 * shared), 1)
    saves = (shared // smaller * smaller - shared // block_size * block_size) * num_others
    advice = f"of {shared} shared tokens only {shared // block_size * block_size} fill blocks of {block_size}: "
    yield Finding(kind="block-size", advice=f"{advice}set option.kv_cache_block_size={smaller}", group=number,
                  at_token=shared, saves_tokens=saves)  # fmt: skip
