"""What lint has to say: findings and groups, as text and as JSON.

Knows counts and words. Knows nothing of how anything was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Finding", "Group", "figures", "text"]


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
    next_texts: tuple[str, str]


def figures(findings: Sequence[Finding], groups: Sequence[Group], *, num_tokens: int) -> dict[str, object]:
    """For --json."""
    return {
        "prompt_tokens": num_tokens,
        "findings": [asdict(finding) for finding in findings],
        "groups": [asdict(group) for group in groups],
    }


def text(findings: Sequence[Finding], groups: Sequence[Group], *, num_tokens: int) -> str:
    """For people: most tokens first."""
    lines = [
        f"group {group.number}: {group.num_prompts} prompts share {group.shared_tokens:,} tokens, then "
        f"{group.next_texts[0]!r} | {group.next_texts[1]!r}"
        for group in groups
    ]
    for finding in sorted(findings, key=lambda finding: -finding.saves_tokens):
        place = "" if finding.group is None else f" in group {finding.group}"
        place += "" if finding.at_token is None else f" at token {finding.at_token:,}"
        lines.append(f"\n{finding.kind}{place}: {finding.advice}")
        lines += [f"  found: {finding.where!r}"] if finding.where else []
        if finding.saves_tokens:
            share = finding.saves_tokens / max(num_tokens, 1)
            lines.append(f"  saves: {finding.saves_tokens:,} of {num_tokens:,} prompt tokens ({share:.0%})")
    return "\n".join([*lines, "" if findings else "nothing to change"]).strip()
