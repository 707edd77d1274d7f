"""`kvreuse explain LOGFILE|-`: the findings as a table, as JSON or as a page with plots.

Knows flags and files. Knows nothing of how findings are made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kvreuse.errors import ConfigError
from kvreuse.ops.explain.findings import explain, read
from kvreuse.ops.files import show, write_text
from kvreuse.telemetry.page import render

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain", help="find out from the log why reuse is what it is", description="Sum up the request log"
    )
    parser.add_argument("log", metavar="LOGFILE", help="lines of the request log; - is stdin")
    parser.add_argument("--json", metavar="FILE", help="write the findings there, - is stdout")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots there")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError when the log cannot be read or holds no request."""
    records = _records(args.log)
    if not records:
        raise ConfigError(
            f"{args.log} holds no line of a request\nhint: the log is what kvreuse serve writes to stdout"
        )
    found = explain(records)
    show("\n".join(table(found)), found, json_to=args.json)
    if args.html is not None:
        write_text(args.html, render("explain.html", found))
    return 0


def _records(name: str) -> list[Mapping[str, Any]]:
    if name == "-":
        return read(sys.stdin)
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            return read(file)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """The findings as lines."""
    yield f"requests: {found['num_requests']:,}, of which failed: {found['num_failed']:,}"
    yield f"hit rate: {_share(found['hit_rate'])} of prompt tokens"
    yield f"lookup share: {_share(found['lookup_share'])} of request time"
    yield ""
    yield f"{'ms':<12}{'requests':>10}{'p50':>12}{'p99':>12}"
    for name in ("ttft_ms", "ttft_hit_ms", "ttft_miss_ms", "queue_ms"):
        times = found[name]
        label = name.removesuffix("_ms").replace("_", " ").replace("ttft", "TTFT")
        yield f"{label:<12}{times['count']:>10,}{_ms(times['p50']):>12}{_ms(times['p99']):>12}"
    yield ""
    yield f"{'template':<28}{'requests':>10}{'hit rate':>10}  diverges at token (requests)"
    for item in found["templates"]:
        places = ", ".join(f"{place} ({count})" for place, count in item["diverged_at"])
        yield f"{item['name'][:27]:<28}{item['num_requests']:>10,}{_share(item['hit_rate']):>10}  {places}".rstrip()
    yield ""
    yield f"{'hour':<28}{'requests':>10}{'hit rate':>10}"
    for item in found["hours"]:
        yield f"{item['hour']:<28}{item['num_requests']:>10,}{_share(item['hit_rate']):>10}"
    for title, counts in (("miss reasons", found["misses"]), ("failures", found["failures"])):
        if counts:
            yield f"\n{title}: " + ", ".join(f"{name} {count:,}" for name, count in counts.items())
    yield "\nwhat this tells:"
    yield from (f"- {sentence}" for sentence in found["tell_tales"] or ["nothing is out of the ordinary"])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
