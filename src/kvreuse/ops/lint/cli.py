"""`kvreuse lint FILE`: reads prompts, finds what breaks reuse, says what to change.

Knows flags and files. Knows nothing of how faults are found.
"""

from __future__ import annotations

import argparse
import sys

from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.files import read_lines, write_json
from kvreuse.ops.lint import report
from kvreuse.ops.lint.checks import check_conversations, check_group
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
    print(report.text(findings, groups, num_tokens=num_tokens), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        write_json(args.json, report.figures(findings, groups, num_tokens=num_tokens))
    return _FOUND if findings else 0


def lint(
    prompts: list[Prompt], *, template: ChatTemplate | None, tokenizer: str | None, block_size: int, threshold: float
) -> tuple[list[report.Finding], list[report.Group], int]:
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
