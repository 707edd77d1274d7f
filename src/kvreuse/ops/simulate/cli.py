"""`kvreuse simulate TRACE`: what a fleet makes of real traffic, one line per way of routing.

Knows flags and tables. Knows nothing of how a fleet works.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from typing import Any

from kvreuse.cache.policy import POLICIES
from kvreuse.errors import ConfigError
from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.files import read_json, show
from kvreuse.ops.simulate.fleet import FleetEvent, Outcome, simulate
from kvreuse.ops.simulate.instance import Costs, RemoteTier, Settings
from kvreuse.ops.simulate.routing import ROUTINGS, Router
from kvreuse.ops.trace import Trace, add_trace_flags, read_trace_of

__all__ = ["add_parser", "costs_of", "run"]

_EVENT = re.compile(r"(\d+(?:\.\d+)?):(restart|[+-]\d+)")
_SPARKS = "▁▂▃▄▅▆▇█"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("simulate", help="what a fleet makes of a trace",
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    add_trace_flags(parser)
    number: dict[str, Any] = {"metavar": "N", "type": at_least(1)}
    parser.add_argument("--instances", default=2, **number, help="at the start")
    parser.add_argument("--pool-tokens", metavar="N", type=float, default=1e6, help="KV pool of an instance")
    parser.add_argument("--routing", choices=ROUTINGS, action="append", help="repeat to compare; all when left out")
    parser.add_argument("--prefix-length", default=4096, **number, help="PrefixLength of PREFIX_AWARE, bytes")
    parser.add_argument("--threshold", default=64, **number, help="ConcurrencyThreshold of PREFIX_AWARE")
    parser.add_argument("--event", type=_event, action="append", default=[], metavar="T:WHAT",
                        help="at second T: +N or -N instances, or restart")  # fmt: skip
    parser.add_argument("--warm-up", action="store_true", help="new instances compute recent shared prefixes first")
    parser.add_argument("--remote-tokens", metavar="N", type=float, help="a remote tier of so many tokens")
    parser.add_argument("--policy", choices=list(POLICIES), default="size_weighted_lru", help="option.kv_cache_policy")
    parser.add_argument("--max-batch-size", default=64, **number, help="option.max_batch_size")
    parser.add_argument("--max-batch-tokens", default=8192, **number, help="option.max_batch_tokens")
    parser.add_argument("--bench", metavar="FILE", help="costs, from `kvreuse bench templates --json FILE`")
    parser.add_argument("--prefill-tps", metavar="N", type=float, default=15000, help="costs: prompt tokens per second")
    parser.add_argument("--step-ms", metavar="MS", type=float, default=10.0, help="costs: a step that only decodes")
    parser.add_argument("--window", metavar="S", type=float, default=300.0, help="seconds per figure of the timeline")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, - is stdout")


def run(args: argparse.Namespace) -> int:
    trace = read_trace_of(args)
    outcomes = {routing: _simulate(trace, args, routing) for routing in args.routing or ROUTINGS}
    figures = {routing: asdict(outcome) for routing, outcome in outcomes.items()}
    show(table(outcomes), figures, json_to=args.json)
    return 0


def costs_of(args: argparse.Namespace) -> Costs:
    """From a measurement, else from the flags. Raises ConfigError for a file that is no such measurement."""
    if args.bench is None:
        return Costs(
            step_s=args.step_ms / 1e3, prefill_token_s=1 / args.prefill_tps, load_token_s=0.1 / args.prefill_tps
        )
    figures: Any = read_json(args.bench)
    try:
        settings = figures["settings"]
        token_s = (figures["ttft_cold_ms"] - figures["ttft_hit_ms"]) / settings["prefix_tokens"] / 1e3
        step_s = figures["ttft_hit_ms"] / 1e3 - token_s * settings["own_tokens"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{args.bench} holds no figures of `kvreuse bench templates`: {error}") from error
    token_s = max(token_s, 1e-7)
    return Costs(step_s=max(step_s, token_s), prefill_token_s=token_s, load_token_s=token_s / 10)


def table(outcomes: dict[str, Outcome]) -> str:
    """One line per routing, its hit rate over time as bars."""
    lines = [f"{'':<28}{'hit rate':>9}{'TTFT mean':>11}{'p95':>9}{'skew':>6}{'failed':>8}  hit rate over time"]
    for routing, o in outcomes.items():
        bars = "".join(_SPARKS[min(7, int(rate * 8))] for rate in o.windows)
        lines.append(f"{routing:<28}{o.hit_rate:>9.1%}{o.ttft_mean_s:>9.2f} s{o.ttft_p95_s:>7.2f} s"
                     f"{o.load_skew:>6.2f}{o.num_failed:>8}  {bars}")  # fmt: skip
    return "\n".join(lines)


def _simulate(trace: Trace, args: argparse.Namespace, routing: str) -> Outcome:
    block = trace.block_size
    settings = Settings(
        pool_tokens=int(args.pool_tokens), block_size=block, max_batch_size=args.max_batch_size,
        max_batch_tokens=args.max_batch_tokens, policy=args.policy, costs=costs_of(args),
    )  # fmt: skip
    router = Router(routing, block_size=block, prefix_length=args.prefix_length, threshold=args.threshold)
    remote = None if args.remote_tokens is None else RemoteTier(int(args.remote_tokens) // block)
    return simulate(
        trace, settings, router, num_instances=args.instances, events=args.event, is_warmed=args.warm_up,
        remote=remote, window_s=args.window,
    )  # fmt: skip


def _event(text: str) -> FleetEvent:
    match = _EVENT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not SECONDS:+N, SECONDS:-N or SECONDS:restart")
    return FleetEvent(float(match[1]), 0 if match[2] == "restart" else int(match[2]))
