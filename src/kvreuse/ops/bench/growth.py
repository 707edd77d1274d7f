"""`kvreuse bench growth`: what a decode step costs as there is more of one thing, the rest staying as it is.

Drives the runner and the cache of a real engine by hand. What KV holds does not change its cost, so prefixes are not
computed: their slots get random numbers. Knows steps and sizes. Knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import log
from statistics import linear_regression, median
from typing import TYPE_CHECKING, Any

from kvreuse.config import Config, set_torch_defaults
from kvreuse.errors import ConfigError
from kvreuse.ops.bench.decode import make_items, step
from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.bench.plot import line_chart
from kvreuse.ops.bench.progress import Progress
from kvreuse.ops.bench.report import Report, environment
from kvreuse.ops.files import write_text
from kvreuse.types import Scope

if TYPE_CHECKING:
    from kvreuse.engine.parts import EngineParts

__all__ = ["add_flags", "measure", "steepest"]

_MAX_SLOPE = 1.15
_SEQUENCES, _TOKENS = 8, 1024  # of a step, where neither is what changes
_NEWCOMER = [1, 2]

Prefix = list[int]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("--steps", type=at_least(1), default=5, metavar="N", help="steps of each point")
    parser.add_argument("--threads", type=at_least(1), default=None, metavar="N", help="CPU threads, the default fits")
    parser.add_argument("--model", default="demo", help="model to run: demo, a folder or a hub id")
    parser.add_argument("--dtype", default="float32", help="type of weights and KV")
    parser.add_argument("--device", default="auto", help="where the model runs")
    parser.add_argument("--quick", action="store_true", help="only the small ends of the axes")
    parser.add_argument("--plot", metavar="FILE", help="draw the curves into this SVG file")


def measure(args: argparse.Namespace) -> Report:
    """Median step at every point of every axis. A fault: one grows faster than its axis. Raises ConfigError."""
    set_torch_defaults()
    from kvreuse.engine.parts import build  # torch takes seconds; flags are checked before

    parts = build(Config(model_id=args.model, dtype=args.dtype, device=args.device, num_threads=args.threads))
    ground = _Ground(parts)
    axes = _axes(ground, is_quick=args.quick)
    progress = Progress(sys.stderr, num_steps=sum(len(xs) for xs, _ in axes.values()))
    taken: dict[str, dict[int, list[float]]] = {}
    try:
        for name, (xs, prefixes_at) in axes.items():
            taken[name] = {}
            for x in xs:
                progress.start(f"{name} {x}")
                taken[name][x] = ground.steps_ms(prefixes_at(x), args.steps)
                progress.advance()
            parts.cache.purge()
    finally:
        progress.close()
    return _report(args, taken)


class _Ground:
    """An engine whose store is filled by hand."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._num_filled = 0

    def prefix(self, name: object, num_tokens: int) -> Prefix:
        """The first tokens of the prefix of that name."""
        return random.Random(str(name)).choices(range(3, self._parts.vocab_size), k=num_tokens)

    def plant(self, prefix: Prefix, num_nodes: int = 1) -> Prefix:
        """The prefix is in the store from now on, as a chain of so many nodes. Raises ConfigError without room."""
        cache = self._parts.cache
        for number in range(1, num_nodes + 1):
            end = len(prefix) * number // num_nodes
            with cache.acquire([*prefix[:end], *_NEWCOMER], scope=Scope()) as lease:
                if not cache.reserve(lease, end, num_computed_tokens=lease.num_cached_tokens):
                    raise ConfigError(f"the KV pool of {self._parts.pool.num_slots} tokens is too small for this")
                cache.commit(lease, prefix, num_computed_tokens=end)
        return prefix

    def steps_ms(self, prefixes: Sequence[Prefix], num_steps: int) -> list[float]:
        """A new request is looked up, and one sequence on each of the prefixes computes a token; again and again."""
        self._fill()
        cache, prompts = self._parts.cache, [[*prefix, 3 + i] for i, prefix in enumerate(prefixes)]
        items = make_items(self._parts, prompts, reuse=True, num_more=num_steps + 2)
        taken = []
        for _ in range(num_steps + 1):
            began_s = time.perf_counter()
            with cache.acquire([*prefixes[0], *_NEWCOMER], scope=Scope()):
                step(self._parts, items)
            taken.append((time.perf_counter() - began_s) * 1e3)
        for item in items:
            cache.release(item.lease)
        return taken[1:]  # the first one warms up

    def _fill(self) -> None:
        """Slots that nobody wrote share one page of zeros, which is read faster than memory."""
        pool = self._parts.pool
        end = pool.num_slots - self._parts.cache.usage().free_slots  # nothing leaves in between: used slots come first
        for slab in (slab for pair in pool.heads for slab in pair):
            if end > self._num_filled:
                slab[:, :, self._num_filled : end].uniform_(-1, 1)
        self._num_filled = max(end, self._num_filled)


Axis = tuple[Sequence[int], Callable[[int], list[Prefix]]]


def _axes(ground: _Ground, *, is_quick: bool) -> dict[str, Axis]:
    """name -> (points, prefixes of the running sequences there, which are in the store then)."""
    doubling = [1, 2, 4] if is_quick else [1, 2, 4, 8, 16, 32, 64]
    num_running = doubling[-1]

    def resident(num_templates: int) -> list[Prefix]:
        for template in range(num_templates):
            ground.plant(ground.prefix(template, 32))
        return [ground.plant(ground.prefix("running", _TOKENS))] * _SEQUENCES

    def running(num_templates: int) -> list[Prefix]:
        templates = [ground.plant(ground.prefix(template, 256)) for template in range(num_templates)]
        return [templates[i % num_templates] for i in range(num_running)]

    return {
        "running sequences": (doubling, lambda x: [ground.plant(ground.prefix("one", _TOKENS))] * x),
        "prefix tokens": (
            [256, 512] if is_quick else [256, 512, 1024, 2048, 4096, 8192],
            lambda x: [ground.plant(ground.prefix("one", x))] * _SEQUENCES,
        ),
        "nodes of the prefix": (
            doubling[:6],
            lambda x: [ground.plant(ground.prefix(x, _TOKENS), num_nodes=x)] * _SEQUENCES,
        ),
        "templates running": (doubling, running),
        "templates in the store": ([1, 10] if is_quick else [1, 10, 100, 1000], resident),
    }


def steepest(taken: Mapping[int, Sequence[float]]) -> float:
    """The largest slope of log cost against log x between neighbours that is beyond noise: from the slowest step at
    one point to the quickest at the next.
    """
    return max(log(min(taken[b]) / max(taken[a])) / log(b / a) for a, b in pairwise(taken))


def _report(args: argparse.Namespace, taken: Mapping[str, Mapping[int, Sequence[float]]]) -> Report:
    axes: dict[str, dict[str, Any]] = {}
    for name, steps in taken.items():
        points = [(x, round(median(ms), 3)) for x, ms in steps.items()]
        slope = linear_regression([log(x) for x, _ in points], [log(ms) for _, ms in points]).slope
        axes[name] = {"points": points, "slope": round(slope, 3), "steepest": round(steepest(steps), 3)}
    figures = {
        "axes": axes,
        "settings": {name: getattr(args, name) for name in ("steps", "model", "dtype", "quick")},
        "environment": environment(),
    }
    if args.plot:
        curves = {name: dict(axis["points"]) for name, axis in axes.items()}
        write_text(args.plot, line_chart(curves, title="decode step, ms", x_title="how many", y_title="ms"))
    too_steep = [f"{name} ({axis['steepest']})" for name, axis in axes.items() if axis["steepest"] > _MAX_SLOPE]
    fault = f"a step grows faster than what it is measured against: {', '.join(too_steep)}" if too_steep else None
    return Report(figures=figures, table="\n".join(_rows(axes)), fault=fault)


def _rows(axes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, axis in axes.items():
        yield f"{name}: step ms, slope {axis['slope']}, steepest {axis['steepest']}"
        yield from (f"{x:>12,}{ms:>12.1f}" for x, ms in axis["points"])
