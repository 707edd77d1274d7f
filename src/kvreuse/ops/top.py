"""`kvreuse top URL`: what the status page shows, in a terminal.

Knows the numbers of /status.json. Draws with plain ANSI and tells kinds apart by letters, not by colour alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from kvreuse.errors import ConfigError

__all__ = ["add_parser", "frame", "run"]

_CLEAR, _RESET = "\x1b[H\x1b[2J", "\x1b[0m"
_KINDS = (("pinned", "#", "\x1b[31m"), ("shared", "=", "\x1b[34m"), ("private", "-", "\x1b[33m"), ("free", ".", ""))
_SPARKS = " ▁▂▃▄▅▆▇█"
_TIMEOUT_S = 5

Numbers = Mapping[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("top", help="watch a server", description="Watch a server, as its page /status does")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080", metavar="URL", help="the server's address")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks")
    parser.add_argument("--once", action="store_true", help="look once and end")


def run(args: argparse.Namespace) -> int:
    """Draw until interrupted. Raises ConfigError when the server cannot be asked."""
    is_terminal = sys.stdout.isatty()
    rates: list[float] = []
    last: Numbers | None = None
    while True:
        now = _ask(args.url.rstrip("/") + "/status.json")
        rates += _rate(now, last)
        columns, lines = shutil.get_terminal_size()
        text = "\n".join(frame(now, rates, columns=columns, lines=lines - 1, has_colour=is_terminal))
        print(_CLEAR + text if is_terminal else text, flush=True)
        if args.once:
            return 0
        last = now
        time.sleep(max(args.interval, 0.1))


def _ask(url: str) -> Numbers:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is no address of a server\nhint: http://HOST:PORT")
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:
            numbers: Numbers = json.load(answer)
    except (URLError, OSError, ValueError) as error:
        raise ConfigError(f"cannot ask {url}: {error}") from error
    return numbers


def _rate(now: Numbers, last: Numbers | None) -> list[float]:
    """The hit rate between two looks, if any prompt was answered."""
    num_tokens = now["prompt_tokens"] - last["prompt_tokens"] if last else 0
    return [(now["cached_tokens"] - last["cached_tokens"]) / num_tokens] if last and num_tokens > 0 else []


def frame(now: Numbers, rates: Sequence[float], *, columns: int, lines: int, has_colour: bool) -> list[str]:
    """The lines of one picture, each at most `columns` wide (colours not counted)."""
    total = now["cached_tokens"] / now["prompt_tokens"] if now["prompt_tokens"] else 0.0
    sparks = "".join(_SPARKS[round(rate * (len(_SPARKS) - 1))] for rate in rates[-max(columns - 50, 0) :])
    misses = sorted(now["misses"].items(), key=lambda item: -item[1])
    out = [
        f"kvreuse {now['model']}  {'serving' if now['up'] else 'NOT SERVING'}  "
        f"running {now['running']:.0f}  waiting {now['waiting']:.0f}  requests {now['requests']:.0f}  "
        f"failures {now['failures']:.0f}",
        f"hit rate  {total:.1%} since start  {f'{rates[-1]:.1%} now' if rates else ''}  {sparks}",
        f"TTFT p50 / p99  hit {_times(now['ttft']['hit'])}  miss {_times(now['ttft']['miss'])}",
        f"prefill saved  {now['saved_s']:,.1f} s",
        "misses  " + (", ".join(f"{reason} {count:.0f}" for reason, count in misses) or "none"),
    ]
    out = [line[:columns] for line in out]
    for tier in now["tiers"]:
        out.append(f"{tier['name']}  {_size(tier['used_bytes'])} of {_size(tier['max_bytes'])}"[:columns])
        if "strip" in tier:
            out.append(_strip(tier, columns, has_colour=has_colour))
            out.append("  ".join(f"{letter} {name}" for name, letter, _ in _KINDS)[:columns])
    tree = [line[:columns] for line in _tree(now["tree"]["nodes"])]
    return [*out, "", *tree][: max(lines, 1)]


def _times(times: Numbers) -> str:
    return " / ".join("-" if times[key] is None else f"{times[key] * 1000:.0f} ms" for key in ("p50_s", "p99_s"))


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _strip(tier: Numbers, columns: int, *, has_colour: bool) -> str:
    """What most slots of each column are."""
    cells, width = tier["strip"], tier["num_slots"] / max(len(tier["strip"]), 1)
    out = []
    for column in range(min(columns, len(cells))):
        first = column * len(cells) // min(columns, len(cells))
        end = (column + 1) * len(cells) // min(columns, len(cells))
        slots = [sum(cell[kind] for cell in cells[first:end]) for kind in range(3)]
        slots.append(width * (end - first) - sum(slots))
        _, letter, colour = _KINDS[slots.index(max(slots))]
        out.append(f"{colour}{letter}{_RESET}" if has_colour and colour else letter)
    return "".join(out)


def _tree(nodes: Sequence[Numbers]) -> Iterator[str]:
    yield f"{'prefix':<24}{'tokens':>8}{'from':>8}{'hits':>7}{'size':>13}{'idle':>9}  tier"
    below: dict[str, list[Numbers]] = {}
    for node in nodes:
        below.setdefault(node["parent"], []).append(node)
    todo = [(node, 0) for node in reversed(below.get("", []))]
    while todo:
        node, depth = todo.pop()
        name = "  " * min(depth, 6) + (node["name"] or node["id"]) + (" *" if node["is_pinned"] else "")
        yield (
            f"{name[:23]:<24}{node['num_tokens']:>8,}{node['depth']:>8,}{node['uses']:>7.1f}"
            f"{_size(node['num_bytes']):>13}{node['idle_s']:>7.0f} s  {node['tier']}"
        )
        todo += [(child, depth + 1) for child in reversed(below.get(node["id"], []))]
