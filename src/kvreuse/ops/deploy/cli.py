"""`kvreuse deploy ENDPOINT`: flags to what is wanted, then the plan is shown or sent.

Knows flags. Knows nothing of AWS.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields

from kvreuse.config import Option
from kvreuse.errors import ConfigError
from kvreuse.ops.deploy.cloud import Cloud, DeployError
from kvreuse.ops.deploy.plan import plan_deploy
from kvreuse.ops.deploy.resources import Call, policy
from kvreuse.ops.deploy.settings import Canary, Hosting, Source, by_field

__all__ = ["add_parser", "carry_out", "run"]

_DECLARED = {item.name: item.metadata.get("option") for kind in (Source, Hosting) for item in fields(kind)}
_SETTINGS: dict[str, Option] = {name: option for name, option in _DECLARED.items() if option and option.doc}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `deploy`."""
    parser = subparsers.add_parser(
        "deploy",
        help="create or update a SageMaker endpoint",
        description="Create or update an endpoint with its alarms, dashboard, queries and autoscaling.",
        epilog="Running it again changes nothing but what differs",
    )
    parser.add_argument("endpoint", metavar="ENDPOINT", help="its name")
    for name, option in _SETTINGS.items():
        default = "" if option.default is MISSING else f" (default: {option.shown(option.default)})"
        parser.add_argument(_flag(name), metavar="VALUE", default=argparse.SUPPRESS, help=option.doc + default)
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of docs/options.md, for all"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable, for all")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an option, for the canary if there is one"
    )
    parser.add_argument("--canary-weight", type=float, metavar="X", help="share of the traffic for a second variant")
    parser.add_argument("--dry-run", action="store_true", help="print the calls as JSON and send none that changes")
    parser.add_argument("--print-policy", action="store_true", help="print the IAM policy that deploying needs")


def run(args: argparse.Namespace) -> int:
    """Show or send. 0, or 1 when AWS says no; raises ConfigError before anything is sent."""
    if args.print_policy:
        print(json.dumps(policy(args.endpoint, role=vars(args).get("role", "arn:aws:iam::*:role/*")), indent=2))
        return 0
    source, hosting = _wanted(args)
    return carry_out(
        lambda cloud: plan_deploy(source, hosting, cloud.observe(hosting.endpoint_name)), is_dry_run=args.dry_run
    )


def carry_out(plan: Callable[[Cloud], Sequence[Call]], *, is_dry_run: bool) -> int:
    """Print the plan as JSON, or send it with a line to stderr for each call. The exit code."""
    cloud = Cloud()
    try:
        calls = plan(cloud)
        if is_dry_run:
            print(json.dumps([call.shown() for call in calls], indent=2))
        else:
            cloud.send(calls, say=lambda line: print(line, file=sys.stderr, flush=True))
    except DeployError as error:
        print(f"kvreuse: error: {error.message}", file=sys.stderr)
        return 1
    return 0


def _wanted(args: argparse.Namespace) -> tuple[Source, Hosting]:
    given = {name: _SETTINGS[name].kind.read(raw) for name, raw in vars(args).items() if name in _SETTINGS}
    for name, option in _SETTINGS.items():
        if option.default is MISSING and name not in given:
            raise ConfigError(f"{_flag(name)} is missing\nhint: kvreuse deploy --help")
    options, change = by_field(_pairs(args.option, "--option")), by_field(_pairs(args.set, "--set"))
    canary = None if args.canary_weight is None else Canary(weight=args.canary_weight, options=change)
    of_source = {item.name: given.pop(item.name) for item in fields(Source) if item.name in given}
    source = Source(**of_source, options=options if canary else options | change, env=_pairs(args.env, "--env"))
    return source, Hosting(endpoint_name=args.endpoint, canary=canary, **given)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _pairs(arguments: Sequence[str], flag: str) -> dict[str, str]:
    pairs = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name or not equals:
            raise ConfigError(f"{flag} is '{argument}', allowed is NAME=VALUE")
        pairs[name] = value
    return pairs
