"""`kvreuse destroy ENDPOINT`: remove what `deploy` has made. Knows flags and nothing of AWS."""

from __future__ import annotations

import argparse

from kvreuse.ops.deploy.cli import carry_out
from kvreuse.ops.deploy.plan import plan_destroy

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `destroy`."""
    parser = subparsers.add_parser(
        "destroy",
        help="remove an endpoint and all that deploy made for it",
        description="Remove an endpoint with its models, alarms, dashboard and queries, and nothing that others made.",
    )
    parser.add_argument("endpoint", metavar="ENDPOINT", help="its name")
    parser.add_argument("--dry-run", action="store_true", help="print the calls as JSON and send none")


def run(args: argparse.Namespace) -> int:
    """Remove it. 0 as well when there is nothing to remove; 1 when AWS says no."""
    return carry_out(lambda cloud: plan_destroy(args.endpoint, cloud.observe(args.endpoint)), is_dry_run=args.dry_run)
