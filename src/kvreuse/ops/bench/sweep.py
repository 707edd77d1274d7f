"""`kvreuse bench http`: a server or a SageMaker endpoint under load, at one concurrency after the other.

Knows the order of the measurement and its figures. Knows nothing of how a request travels.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any

from kvreuse.errors import ConfigError
from kvreuse.ops.bench.load import Ask, BusyError, Client, LoadError, Reply
from kvreuse.ops.bench.numbers import add_numbers, at_least, many
from kvreuse.ops.bench.plot import line_chart
from kvreuse.ops.bench.progress import Progress
from kvreuse.ops.bench.report import Report, environment
from kvreuse.ops.bench.server import serving
from kvreuse.ops.bench.workload import Workload, load_tokenizer
from kvreuse.ops.files import write_text

__all__ = ["add_flags", "measure", "percentile"]

Send = Callable[[Ask], Reply]
Level = dict[str, Any]

_SETTINGS = (
    "url", "endpoint", "concurrencies", "requests", "templates", "prefix_tokens", "own_tokens", "max_new_tokens",
    "seed", "model", "dtype", "no_stream",
)  # fmt: skip
# title, figure, format
_COLUMNS = (
    ("at once", "concurrency", "{:,}"),
    ("requests/s", "requests_per_s", "{:,.2f}"),
    ("tokens/s", "output_tokens_per_s", "{:,.1f}"),
    ("p50 ms", "latency_p50_ms", "{:,.0f}"),
    ("p95 ms", "latency_p95_ms", "{:,.0f}"),
    ("p99 ms", "latency_p99_ms", "{:,.0f}"),
    ("TTFT p50", "ttft_p50_ms", "{:,.0f}"),
    ("TTFT p99", "ttft_p99_ms", "{:,.0f}"),
    ("hit rate", "token_hit_rate", "{:.1%}"),
    ("503", "num_busy", "{:,}"),
    ("errors", "num_errors", "{:,}"),
)
_CURVES = {
    "output tokens/s": "output_tokens_per_s",
    "requests/s": "requests_per_s",
    "latency p50, ms": "latency_p50_ms",
    "latency p95, ms": "latency_p95_ms",
    "time to first token p50, ms": "ttft_p50_ms",
    "hit rate, share of prompt tokens": "token_hit_rate",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("--url", help="measure this running server and start none")
    parser.add_argument("--endpoint", metavar="NAME", help="measure this SageMaker endpoint and start no server")
    parser.add_argument("--region", help="of the endpoint, where AWS's own configuration does not say")
    parser.add_argument("--endpoint-url", metavar="URL", help="of the runtime API, instead of AWS's")
    levels = many(at_least(1))
    parser.add_argument("--concurrencies", type=levels, default="1,2,4,8,16,32", metavar="N,...", help="levels")
    # name, default, lowest, help
    numbers = (
        ("requests", 32, 1, "requests of each level"),
        ("templates", 4, 1, "templates that prompts are drawn from"),
        ("prefix-tokens", 1024, 64, "tokens that prompts of a template share"),
        ("own-tokens", 48, 16, "further tokens of each prompt"),
        ("max-new-tokens", 16, 1, "tokens of each answer"),
        ("seed", 0, 0, "the same seed gives the same prompts"),
    )
    add_numbers(parser, numbers)
    parser.add_argument("--no-stream", action="store_true", help="ask for answers in one piece")
    parser.add_argument("--model", default="demo", help="model to serve: demo, a folder or a hub id")
    parser.add_argument("--dtype", default="float32", help="type of weights and KV of the served model")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="where tokenizer.json is, if --model has none")
    parser.add_argument("--plot", metavar="FILE", help="draw the levels into this SVG file")


def measure(args: argparse.Namespace) -> Report:
    """One level after the other. Raises ConfigError when it cannot begin, LoadError when nothing answers."""
    if args.url and args.endpoint:
        raise ConfigError("--url and --endpoint are two things to measure: name one")
    workload = Workload(
        load_tokenizer(args.tokenizer or args.model),
        prefix_tokens=args.prefix_tokens,
        own_tokens=args.own_tokens,
        seed=args.seed,
        marker=f"Copy {secrets.token_hex(4)}. " if args.url or args.endpoint else "",
    )
    make_ask = partial(Ask, max_new_tokens=args.max_new_tokens, is_stream=not args.no_stream)
    progress = Progress(sys.stderr, num_steps=args.templates + len(args.concurrencies) * args.requests)
    try:
        progress.start("starting")
        with _sender(args) as send:
            run = partial(_run_level, send, on_reply=progress.advance)
            progress.start("the first request of each template")
            first = run([make_ask(text=workload.variant(t)) for t in range(args.templates)], concurrency=1)
            if not first["num_ok"]:
                raise LoadError(f"nothing was answered: {first['first_error']}")
            levels = []
            for concurrency in args.concurrencies:
                progress.start(f"{concurrency} at a time")
                prompts = workload.draw(args.requests, num_templates=args.templates)
                levels.append(run([make_ask(text=text) for text in prompts], concurrency=concurrency))
    finally:
        progress.close()
    return _report(args, levels)


@contextmanager
def _sender(args: argparse.Namespace) -> Iterator[Send]:
    """How a request gets to what is measured."""
    most = args.concurrencies[-1]
    if args.endpoint:
        from kvreuse.ops.bench.endpoint import Endpoint  # boto3 takes a while; most measurements do without

        yield Endpoint(args.endpoint, max_connections=most, region=args.region, endpoint_url=args.endpoint_url).ask
    elif args.url:
        yield Client(args.url).ask
    else:
        options = {
            "model_id": args.model,
            "dtype": args.dtype,
            "max_batch_size": max(64, most),
            "request_timeout_s": 600,
        }
        with serving(options) as url:
            yield Client(url).ask


def _run_level(send: Send, asks: Sequence[Ask], *, concurrency: int, on_reply: Callable[[], None]) -> Level:
    """So many requests in flight until all are done; a refused one is counted and not sent again."""

    def attempt(ask: Ask) -> Reply | LoadError:
        try:
            return send(ask)
        except LoadError as error:
            return error
        finally:
            on_reply()

    began_s = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            outcomes = list(pool.map(attempt, asks))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C nobody waits for the others
    return {"concurrency": concurrency, **_figures(outcomes, duration_s=time.perf_counter() - began_s)}


def _figures(outcomes: Sequence[Reply | LoadError], *, duration_s: float) -> Level:
    replies = [outcome for outcome in outcomes if isinstance(outcome, Reply)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, LoadError)]
    num_busy = sum(isinstance(error, BusyError) for error in errors)
    latencies = [reply.total_ms for reply in replies]
    firsts = [reply.ttft_ms for reply in replies if reply.ttft_ms is not None]
    prompt_tokens = sum(reply.prompt_tokens for reply in replies)
    return {
        "num_ok": len(replies),
        "num_busy": num_busy,
        "num_errors": len(errors) - num_busy,
        "duration_s": round(duration_s, 3),
        "requests_per_s": round(len(replies) / duration_s, 3),
        "output_tokens_per_s": round(sum(reply.output_tokens for reply in replies) / duration_s, 3),
        **{f"latency_p{p}_ms": percentile(latencies, p) for p in (50, 95, 99)},
        **{f"ttft_p{p}_ms": percentile(firsts, p) for p in (50, 99)},
        "token_hit_rate": round(sum(r.cached_tokens for r in replies) / prompt_tokens, 4) if prompt_tokens else None,
        "first_error": errors[0].message if errors else None,
    }


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that `percent` % of them do not exceed; None of nothing."""
    return round(sorted(values)[ceil(len(values) * percent / 100) - 1], 3) if values else None


def _report(args: argparse.Namespace, levels: Sequence[Level]) -> Report:
    figures = {
        "levels": levels,
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "environment": environment(),
    }
    if args.plot:
        curves = {
            name: {level["concurrency"]: level[figure] for level in levels if level[figure]}
            for name, figure in _CURVES.items()
        }
        title = args.endpoint or args.url or f"{args.model}, {args.dtype}"
        write_text(args.plot, line_chart(curves, title=title, x_title="requests at once", y_title="see the names"))
    num_answered = sum(level["num_ok"] for level in levels)
    reason = next((level["first_error"] for level in levels if level["first_error"]), None)
    lines = ["".join(f"{title:>12}" for title, _, _ in _COLUMNS), *map(_row, levels)]
    if reason:
        lines.append(f"first error: {reason}")
    return Report(figures=figures, table="\n".join(lines), fault=None if num_answered else "no request was answered")


def _row(level: Mapping[str, Any]) -> str:
    cells = ("" if level[name] is None else shown.format(level[name]) for _, name, shown in _COLUMNS)
    return "".join(f"{cell:>12}" for cell in cells)
