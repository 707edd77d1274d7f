"""The `kvreuse` command: finds the subcommand, imports only that one, turns refusals into one clear sentence.

Knows the names of the subcommands. Knows nothing of what they do.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvreuse import __version__
from kvreuse.config.names import unknown
from kvreuse.errors import ConfigError

__all__ = ["COMMANDS", "build_parser", "main"]

# name -> (module with add_parser(subparsers) and run(args) -> exit code, help)
COMMANDS = {
    "serve": ("kvreuse.cli.serve", "serve a model"),
    "bench": ("kvreuse.ops.bench.cli", "measure what reuse brings"),
    "top": ("kvreuse.ops.top", "watch a server"),
    "warm": ("kvreuse.ops.warm", "compute templates on an endpoint"),
    "explain": ("kvreuse.ops.explain.cli", "find out from the log why reuse is what it is"),
    "lint": ("kvreuse.ops.lint.cli", "find what breaks reuse in prompts"),
    "plan": ("kvreuse.ops.plan.cli", "the cheapest fleet for a hit rate"),
    "simulate": ("kvreuse.ops.simulate.cli", "what a fleet makes of a trace"),
    "deploy": ("kvreuse.ops.deploy.cli", "create or update a SageMaker endpoint"),
    "destroy": ("kvreuse.ops.deploy.destroy", "remove an endpoint and all that deploy made for it"),
    "compare": ("kvreuse.ops.deploy.compare", "show the variants of an endpoint side by side"),
}
_ROOT_FLAGS = ("-h", "--help", "--version")
_LONG_FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w.-]*")
_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


class _Parser(argparse.ArgumentParser):
    """Refuses by exception, so that every refusal is shown in one form; never guesses from half a flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\nhint: {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 fine, 1 refused (the reason is on stderr)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ConfigError as error:
        print(f"kvreuse: error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def build_parser(command: str | None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The whole parser, and the parser of each subcommand; only that of `command` knows its flags."""
    parser = _Parser(prog="kvreuse", description="KV reuse for templated prompts on SageMaker")
    parser.add_argument("--version", action="version", version=f"kvreuse {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (module, help_text) in COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=help_text)
    return parser, dict(subparsers.choices)


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if not command.startswith("-") and command not in COMMANDS:
        raise unknown("command", command, COMMANDS, help_command="kvreuse --help")
    parser, by_name = build_parser(command)
    if command.startswith("-") and command not in _ROOT_FLAGS:
        _refuse(command, parser)
    args, extras = parser.parse_known_args(arguments or [command])
    if extras:
        _refuse(extras[0], _deepest(by_name[command], arguments[1:]))
    code: int = importlib.import_module(COMMANDS[command][0]).run(args)
    return code


def _deepest(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.ArgumentParser:
    """The parser of the innermost subcommand that was named."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for number, argument in enumerate(arguments):
                if argument in action.choices:
                    return _deepest(action.choices[argument], arguments[number + 1 :])
    return parser


def _refuse(argument: str, parser: argparse.ArgumentParser) -> NoReturn:
    if not argument.startswith("-"):
        raise ConfigError(f"unexpected argument {argument}\nhint: {parser.prog} --help")
    known = sorted(set(_LONG_FLAG.findall(parser.format_help())))
    raise unknown("flag", argument.partition("=")[0], known, help_command=f"{parser.prog} --help")


if __name__ == "__main__":
    sys.exit(main())
