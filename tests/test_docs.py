"""Documentation and code say the same: options, DJL keys, commands and flags, in both directions."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from kvreuse.cli.main import COMMANDS, build_parser
from kvreuse.config import FLAG_NAMES, OPTIONS
from kvreuse.config.names import DJL_ONLY

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w.-]*")


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def helps(parser: argparse.ArgumentParser) -> str:
    """The help of a command and of every command below it."""
    below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return parser.format_help() + "".join(helps(child) for choices in below for child in choices.values())


def flags_of(command: str) -> set[str]:
    return set(FLAG.findall(helps(build_parser(command)[1][command])))


def test_every_option_has_its_row_and_every_row_its_option() -> None:
    rows = [line for line in read("options.md").splitlines() if re.match(r"\| `", line)]
    assert rows == [
        f"| `{option.key}` | `{option.shown(option.default)}` | {option.kind.allowed} | {option.unit} | {option.doc} |"
        for option in OPTIONS.values()
    ]


def test_every_variable_of_the_platform_is_documented() -> None:
    variables = {variable for option in OPTIONS.values() for variable in option.env}
    assert set(re.findall(r"SAGEMAKER_\w+", read("options.md"))) == variables


def test_the_ignored_settings_of_djl_serving_are_all_named() -> None:
    paragraph = read("options.md").partition("belong to DJL Serving alone")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([\w.]+)`", paragraph)) == DJL_ONLY


def test_every_command_has_its_row_and_every_row_its_command() -> None:
    assert re.findall(r"^\| `kvreuse (\w+)` ", read("cli.md"), re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_is_documented(command: str) -> None:
    documented = set(FLAG.findall(read("cli.md"))) | {f"--{flag}" for flag in FLAG_NAMES}
    assert flags_of(command) <= documented


def test_every_documented_flag_exists() -> None:
    known = set(FLAG.findall(build_parser(None)[0].format_help())) | {f"--{flag}" for flag in FLAG_NAMES} | {"--help"}
    for command in COMMANDS:
        known |= flags_of(command)
    assert set(FLAG.findall(read("cli.md"))) <= known


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    targets = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text("utf-8"))
    ]
    assert [(page.name, link) for page, link in targets if not (page.parent / link).exists()] == []
