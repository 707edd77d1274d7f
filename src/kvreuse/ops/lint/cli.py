"""`kvreuse lint FILE`: reads prompts, finds what breaks reuse, says what to change.

Knows flags and files. Knows nothing of how faults are found.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.files import read_lines, show
from kvreuse.ops.lint.checks import Finding, Group, check_conversations, check_group
from kvreuse.ops.lint.groups import group_similar
from kvreuse.ops.lint.prompts import Prompt, read_prompts, splitter
from kvreuse.ops.lint.template import ChatTemplate, check_template, plain

__all__ = ["add_parser", "lint", "run"]

_FOUND = 2  # exit code: there is something to change


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("lint", help="find what breaks reuse in prompts",
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("file", help="prompts: JSON lines or an array of texts, bodies or chat requests")
    parser.add_argument("--chat-template", metavar="T", help="a .jinja file, tokenizer_config.json or a folder")
    parser.add_argument(
        "--tokenizer", metavar="T", help="demo, or a folder with tokenizer.json; words are counted else"
    )
    parser.add_argument("--block-size", metavar="N", type=at_least(1), default=32, help="option.kv_cache_block_size")
    parser.add_argument("--similarity", metavar="S", type=float, default=0.85, help="above it prompts form a group")
    parser.add_argument("--json", metavar="FILE", help="write the findings there, - is stdout")


def run(args: argparse.Namespace) -> int:
    """0 when there is nothing to change, else 2. Raises ConfigError when the input cannot be read."""
    template = ChatTemplate.load(args.chat_template) if args.chat_template else None
    prompts = read_prompts(read_lines(args.file), render=template or plain)
    findings, groups, num_tokens = lint(prompts, template=template, tokenizer=args.tokenizer,
                                        block_size=args.block_size, threshold=args.similarity)  # fmt: skip
    figures = {"prompt_tokens": num_tokens, "findings": [asdict(finding) for finding in findings],
               "groups": [asdict(group) for group in groups]}  # fmt: skip
    show(_text(findings, groups, num_tokens=num_tokens), figures, json_to=args.json)
    return _FOUND if findings else 0


def lint(
    prompts: list[Prompt], *, template: ChatTemplate | None, tokenizer: str | None, block_size: int, threshold: float
) -> tuple[list[Finding], list[Group], int]:
    """Findings, groups and the number of prompt tokens."""
    split = splitter(tokenizer)
    findings = list(check_template(template)) if template else []
    findings += check_conversations(prompts)
    groups = []
    for number, members in enumerate(group_similar([prompt.text for prompt in prompts], threshold=threshold), 1):
        group, found = check_group(number, [prompts[i] for i in members], split=split, block_size=block_size)
        groups.append(group)
        findings += found
    return findings, groups, sum(len(split(prompt.text)[0]) for prompt in prompts)


def _text(findings: Sequence[Finding], groups: Sequence[Group], *, num_tokens: int) -> str:
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
