"""`kvreuse plan TRACE`: the fleet that reaches a hit rate at the least cost, as a table, JSON and a plot.

Knows flags, tables and SVG. Knows nothing of how a fleet is found.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from math import log

from kvreuse.errors import ConfigError
from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.files import show, write_text
from kvreuse.ops.plan.hardware import read_instance_types, read_model
from kvreuse.ops.plan.planner import Plan, Planner
from kvreuse.ops.trace import add_trace_flags, read_trace_of

__all__ = ["add_parser", "run"]

_CAPACITIES = [int(10**power * step) for power in range(4, 9) for step in (1, 2, 5)]
_WIDTH, _HEIGHT = 640, 360


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("plan", help="the cheapest fleet for a hit rate",
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    add_trace_flags(parser)
    parser.add_argument("--model", required=True, metavar="CONFIG", help="config.json or a folder that has it")
    parser.add_argument("--target", type=float, default=0.5, metavar="RATE", help="cached / prompt tokens, 0 to 1")
    parser.add_argument("--prices", metavar="FILE", help="instance types and prices, instead of those that come along")
    parser.add_argument("--max-instances", type=at_least(1), default=64, metavar="N", help="largest fleet to try")
    parser.add_argument("--memory-ratio", type=float, default=0.4, metavar="R", help="option.kv_cache_memory_ratio")
    parser.add_argument("--bytes-per-value", type=at_least(1), default=2, metavar="N", help="of weights and KV")
    parser.add_argument("--rate-factor", type=float, default=1.0, metavar="F", help="the load / that of the trace")
    parser.add_argument("--plot", metavar="FILE", help="write hit rate by capacity there, as SVG")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, - is stdout")


def run(args: argparse.Namespace) -> int:
    """0 with a plan, 1 when no fleet reaches the target. Raises ConfigError."""
    if not 0 < args.target < 1:
        raise ConfigError(f"the target is {args.target}, allowed is a hit rate between 0 and 1")
    model = read_model(args.model, bytes_per_value=args.bytes_per_value)
    types = read_instance_types(args.prices)
    planner = Planner(read_trace_of(args), max_instances=args.max_instances, rate_factor=args.rate_factor)
    is_possible = planner.ceiling >= args.target
    plan = planner.plan(args.target, types, model, memory_ratio=args.memory_ratio) if is_possible else None
    curve = {capacity: planner.demand(1, 0).hit_rate(capacity) for capacity in _CAPACITIES}
    lines = [
        f"KV per token: {model.kv_bytes_per_token:,} bytes",
        f"hit rate without bound: {planner.ceiling:.1%}; the rest are tokens that nobody said before",
        "one cache: " + ", ".join(f"{c:,} tokens {rate:.1%}" for c, rate in curve.items() if str(c)[0] == "1"),
        _table(plan) if plan else _refusal(planner, args.target, is_possible=is_possible),
    ]
    figures = {"plan": asdict(plan) if plan else None, "ceiling": planner.ceiling, "curve": curve,
               "kv_bytes_per_token": model.kv_bytes_per_token,
               "blame": [asdict(blame) for blame in planner.blame()]}  # fmt: skip
    show("\n".join(lines), figures, json_to=args.json)
    if args.plot:
        write_text(args.plot, _svg({"one cache": curve} | _fleet_curve(planner, plan)))
    return 0 if plan else 1


def _table(plan: Plan) -> str:
    tiers = ", ".join(f"{name} {size:,} tokens" for name, size in plan.tier_tokens.items() if size)
    rates = ", ".join(f"{name} {rate:.1%}" for name, rate in plan.hit_rate_by_tier.items())
    rows = {
        "fleet": f"{plan.num_instances} x {plan.instance_type}, {plan.usd_per_hour:,.2f} USD per hour",
        "hit rate": f"{plan.hit_rate:.1%} (up to {rates})",
        "KV per instance": tiers,
        "PREFIX_AWARE": f"PrefixLength {plan.prefix_length}, ConcurrencyThreshold {plan.concurrency_threshold}",
        "option.max_concurrency": f"{plan.max_concurrency}",
        "busiest instance": f"{plan.load_skew:.2f} x the mean load, busy {plan.load:.0%} of the time",
        "mean TTFT": f"{plan.ttft_s:.2f} s",
    }
    return "\n".join(f"{name:<24}{value}" for name, value in rows.items())


def _refusal(planner: Planner, target: float, *, is_possible: bool) -> str:
    why = "no fleet of these types and sizes does" if is_possible else "no cache of any size can"
    lines = [f"a hit rate of {target:.1%} cannot be reached: {why}", "most new tokens come from prompts that begin as"]
    for blame in planner.blame():
        lines.append(f"  request {blame.first_request + 1:,} of the file does: {blame.num_requests:,} requests, "
                     f"{blame.prompt_share:.1%} of all tokens, {blame.compulsory_share:.1%} new")  # fmt: skip
    return "\n".join([*lines, "hint: kvreuse lint says what keeps prompts from sharing more"])


def _fleet_curve(planner: Planner, plan: Plan | None) -> dict[str, dict[int, float]]:
    if plan is None:
        return {}
    demand = planner.demand(plan.num_instances, plan.prefix_length)
    return {f"{plan.num_instances} instances, each": {c: demand.hit_rate(c) for c in _CAPACITIES}}


def _svg(curves: dict[str, dict[int, float]]) -> str:
    """Hit rate by tokens of cache, logarithmic."""
    low, high = log(_CAPACITIES[0]), log(_CAPACITIES[-1])
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-50 -20 {_WIDTH + 80} {_HEIGHT + 60}" font-size="12">']
    for rate in range(0, 101, 20):
        y = _HEIGHT * (1 - rate / 100)
        parts.append(f'<path d="M0 {y}H{_WIDTH}" stroke="#ddd"/><text x="-40" y="{y + 4}">{rate} %</text>')
    for capacity in _CAPACITIES[::3]:
        x = _WIDTH * (log(capacity) - low) / (high - low)
        parts.append(f'<text x="{x:.0f}" y="{_HEIGHT + 20}" text-anchor="middle">{capacity:,}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(
            f"{_WIDTH * (log(c) - low) / (high - low):.1f},{_HEIGHT * (1 - rate):.1f}" for c, rate in curve.items()
        )
        colour = ("#06c", "#c30")[number % 2]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="10" y="{15 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
