"""`kvreuse bench store`: what the prefix cache costs per block as it grows, in time and memory, and with many threads.

Drives the real cache in this process, without a model. Knows blocks, times and threads. Knows nothing of tensors.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from math import inf
from pathlib import Path
from resource import getpagesize
from statistics import median

from kvreuse.cache.hashing import block_hashes
from kvreuse.cache.store import PrefixCache
from kvreuse.cache.tree import NUM_BUCKETS
from kvreuse.ops.bench.numbers import at_least, many
from kvreuse.ops.bench.progress import Progress
from kvreuse.ops.bench.report import Report, environment
from kvreuse.types import Scope

__all__ = ["add_flags", "measure"]

_BLOCK = 32
_SCOPE = Scope()
_ROUNDS = 5
_MAX_CHUNK = 1000  # prompts of a round
_PROMPTS_PER_THREAD = 400
_MAX_GROWTH = 1.5
_KINDS = ("match", "commit", "evict")

_Prompt = list[int]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    sizes, default = many(at_least(128)), "10000,100000,1000000"
    parser.add_argument("--entries", type=sizes, default=default, metavar="N,...", help="blocks in the store")
    parser.add_argument("--prompt-blocks", type=at_least(1), default=1, metavar="N", help="blocks of each prompt")
    parser.add_argument("--threads", type=at_least(1), default=8, metavar="N", help="threads that use it at once")


def measure(args: argparse.Namespace) -> Report:
    """Processor time per block at every size, the sizes in turn; then many threads, by the clock."""
    progress = Progress(sys.stderr, num_steps=len(args.entries) + 2)
    stores = []
    try:
        for num_blocks in args.entries:
            progress.start(f"filling a store of {num_blocks:,} blocks")
            stores.append(_Store(num_blocks, args.prompt_blocks))
            progress.advance()
        progress.start("matching, storing, evicting")
        for kind in _KINDS:
            for _ in range(_ROUNDS):
                for store in stores:
                    store.measure(kind)
        progress.advance()
        progress.start(f"{args.threads} threads")
        threads = [*_with_threads(args.threads, is_equal=False), *_with_threads(args.threads, is_equal=True)]
        progress.advance()
    finally:
        progress.close()
    return _report(args, [store.point() for store in stores], threads)


class _Store:
    """A cache that is filled so far that all rounds of storing still have room."""

    def __init__(self, num_blocks: int, prompt_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._prompt_blocks = prompt_blocks
        self._chunk = max(1, min(_MAX_CHUNK, num_blocks // prompt_blocks // (2 * _ROUNDS)))
        self._times_us: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        self._num_prompts = num_blocks // prompt_blocks - _ROUNDS * self._chunk
        gc.collect()
        before = _resident_bytes()
        self._cache = _make_cache(num_blocks)
        for number in range(self._num_prompts):
            _store(self._cache, [_prompt(number, prompt_blocks)])
        gc.collect()
        self._bytes_per_block = (_resident_bytes() - before) / (self._num_prompts * prompt_blocks)

    def measure(self, kind: str) -> None:
        """A round of `_KINDS`. All rounds of "commit" find room; those of "evict", behind them, find none."""
        if kind == "match":
            numbers: Sequence[int] = random.choices(range(self._num_prompts), k=self._chunk)
        else:
            numbers = range(self._num_prompts, self._num_prompts + self._chunk)
            self._num_prompts += self._chunk
        prompts = [_prompt(number, self._prompt_blocks) for number in numbers]
        began_s = time.thread_time()
        (_match if kind == "match" else _store)(self._cache, prompts)
        took_us = (time.thread_time() - began_s) * 1e6
        self._times_us[kind].append(took_us / len(prompts) / self._prompt_blocks)

    def point(self) -> dict[str, float]:
        """What was measured at this size."""
        times = {f"{kind}_us": round(median(times), 3) for kind, times in self._times_us.items()}
        return {"entries": self._num_blocks, **times, "bytes_per_block": round(self._bytes_per_block)}


def _prompt(number: int, num_blocks: int = 1) -> _Prompt:
    """Whole blocks and one token that no other number shares."""
    return [number, *range(1, num_blocks * _BLOCK + 1)]


def _make_cache(num_blocks: int) -> PrefixCache:
    return PrefixCache(
        num_slots=num_blocks * _BLOCK,
        block_size=_BLOCK,
        bytes_per_token=1,
        move_slots=lambda source, target, length: None,
        ttl_s=inf,
    )


def _match(cache: PrefixCache, prompts: Sequence[_Prompt]) -> None:
    for prompt in prompts:
        with cache.acquire(prompt, scope=_SCOPE):
            pass


def _store(cache: PrefixCache, prompts: Sequence[_Prompt]) -> None:
    """Whole blocks only, so that it is the index and the policy that are measured and not how a pool is kept tidy."""
    for prompt in prompts:
        with cache.acquire(prompt, scope=_SCOPE) as lease:
            if cache.reserve(lease, len(prompt) - 1, num_computed_tokens=lease.num_cached_tokens):
                cache.commit(lease, prompt, num_computed_tokens=len(prompt) - 1)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


def _with_threads(num_threads: int, *, is_equal: bool) -> list[dict[str, object]]:
    """Blocks per second of one thread and of all on the same prompts: all in one bucket, or each thread in its own."""
    step = min(num_threads, NUM_BUCKETS)
    buckets = [{0} if is_equal else {*range(thread % step, NUM_BUCKETS, step)} for thread in range(num_threads)]
    shares = [_prompts_in(own, start=thread << 24) for thread, own in enumerate(buckets)]
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(_ROUNDS):
        for num_workers in (1, num_threads):
            cache = _make_cache(2 * num_threads * _PROMPTS_PER_THREAD)
            for kind, work in (("commit", _store), ("match", _match)):
                began_s = time.perf_counter()
                with ThreadPoolExecutor(num_workers) as pool:
                    list(pool.map(partial(work, cache), shares))
                took_s = time.perf_counter() - began_s
                rates.setdefault((kind, num_workers), []).append(num_threads * _PROMPTS_PER_THREAD / took_s)
            cache.check_integrity()
    return [
        {
            "kind": kind,
            "buckets": "equal" if is_equal else "disjoint",
            "one_thread_ops_per_s": round(median(rates[kind, 1])),
            "threads_ops_per_s": round(median(rates[kind, num_threads])),
        }
        for kind in ("match", "commit")
    ]


def _prompts_in(buckets: set[int], *, start: int) -> list[_Prompt]:
    """Prompts of one block that the index files in these buckets."""
    prompts = (_prompt(number) for number in count(start))
    hashes = ((p, block_hashes(p[:_BLOCK], scope=_SCOPE, block_size=_BLOCK)[0]) for p in prompts)
    return list(islice((p for p, name in hashes if name[0] % NUM_BUCKETS in buckets), _PROMPTS_PER_THREAD))


def _report(
    args: argparse.Namespace, points: Sequence[Mapping[str, float]], threads: Sequence[Mapping[str, object]]
) -> Report:
    first, last = points[0], points[-1]
    growth = {kind: round(last[f"{kind}_us"] / first[f"{kind}_us"], 3) for kind in _KINDS}
    figures = {
        "points": points,
        **{f"{kind}_growth": ratio for kind, ratio in growth.items()},
        "bytes_per_block": last["bytes_per_block"],
        "block_operations_per_s": round(2e6 / last["evict_us"]),
        "threads": threads,
        "settings": {name: getattr(args, name) for name in ("entries", "prompt_blocks", "threads")},
        "environment": environment(),
    }
    rows = [f"{'blocks in the store':<22}{'match us':>12}{'store us':>12}{'evict us':>12}{'bytes a block':>16}"]
    for point in points:
        cells = "".join(f"{point[f'{kind}_us']:>12.2f}" for kind in _KINDS)
        rows.append(f"{point['entries']:<22,}{cells}{point['bytes_per_block']:>16,.0f}")
    rows.append(f"{'largest / smallest':<22}" + "".join(f"{growth[kind]:>10.2f} x" for kind in _KINDS))
    rows.append(f"\n{'blocks per second':<22}{'1 thread':>12}{f'{args.threads} threads':>12}")
    for row in threads:
        what = f"{row['kind']}, {row['buckets']} buckets"
        rows.append(f"{what:<22}{row['one_thread_ops_per_s']:>12,}{row['threads_ops_per_s']:>12,}")
    grown = [f"{kind} ({ratio} x)" for kind, ratio in growth.items() if ratio > _MAX_GROWTH]
    fault = f"the cost of a block grows with the store: {', '.join(grown)}" if grown else None
    return Report(figures=figures, table="\n".join(rows), fault=fault)
