"""`kvreuse bench policy`: a trace of prompts through the real prefix cache, without a model: what does eviction keep?

Knows traces in which every block of a prompt has a name (Mooncake's format). Knows nothing of tensors or engines.

A block of the trace is one slot of the cache, its name the token in it. Only whole blocks are kept and a prompt's last
token is never a hit, as in the engine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

from kvreuse.cache.policy import POLICIES
from kvreuse.cache.store import PrefixCache
from kvreuse.config import Config
from kvreuse.errors import ConfigError
from kvreuse.ops.bench.report import Report, environment
from kvreuse.types import Scope

__all__ = ["Prompt", "Trace", "add_flags", "ceiling", "measure", "read_trace", "replay"]

_SCOPE = Scope()
_NO_MATCH_BEHIND = 0  # the token behind the whole blocks of a prompt; names are numbered from 1
# The ceiling takes some seconds and 100 bytes per million of block names.
_MAX_NAMES_FOR_CEILING = 2_000_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """`blocks`: numbers of its whole blocks, 1 and up. num_matchable: how many of them end before the last token."""

    arrival_s: float
    num_tokens: int
    blocks: Sequence[int]
    num_matchable: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts by arrival; a block holds `block_size` tokens."""

    prompts: Sequence[Prompt]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one policy did with a trace."""

    token_hit_rate: float
    num_evicted_blocks: int
    block_operations_per_s: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("--trace", required=True, metavar="FILE", help="prompts as JSON lines, plain or gzip")
    parser.add_argument("--capacity-tokens", type=_positive, required=True, metavar="N", help="size of the cache")
    parser.add_argument("--policy", choices=list(POLICIES), default=Config().kv_cache_policy, help="eviction policy")
    parser.add_argument("--block-tokens", type=_positive, default=None, metavar="N", help="of a block of the trace")


def measure(args: argparse.Namespace) -> Report:
    """The share of prompt tokens that each policy reused. Raises ConfigError for a trace that cannot be replayed."""
    trace = read_trace(args.trace, block_size=args.block_tokens)
    num_blocks = args.capacity_tokens // trace.block_size
    if not num_blocks:
        raise ConfigError(f"--capacity-tokens {args.capacity_tokens} is less than a block of {trace.block_size} tokens")
    outcomes = {name: replay(trace, num_blocks=num_blocks, policy=name) for name in dict.fromkeys((args.policy, "lru"))}
    chosen = outcomes[args.policy]
    num_names = sum(len(prompt.blocks) for prompt in trace.prompts)
    best = ceiling(trace, num_blocks=num_blocks) if num_names <= _MAX_NAMES_FOR_CEILING else None
    figures = {
        "policy": args.policy,
        "capacity_tokens": args.capacity_tokens,
        "block_tokens": trace.block_size,
        "num_requests": len(trace.prompts),
        "prompt_tokens": trace.num_tokens,
        "token_hit_rate": round(chosen.token_hit_rate, 5),
        "lru_token_hit_rate": round(outcomes["lru"].token_hit_rate, 5),
        "ceiling_token_hit_rate": None if best is None else round(best, 5),
        "evicted_blocks": chosen.num_evicted_blocks,
        "block_operations_per_s": round(chosen.block_operations_per_s),
        "environment": environment(),
    }
    rows = {**{name: outcome.token_hit_rate for name, outcome in outcomes.items()}, "ceiling": best}
    title = f"prompt tokens reused of {trace.num_tokens:,}, cache of {args.capacity_tokens:,}"
    lines = [f"{name:<24}{'not computed' if rate is None else f'{rate:.2%}':>12}" for name, rate in rows.items()]
    return Report(figures=figures, table="\n".join([title, *lines]))


def replay(trace: Trace, *, num_blocks: int, policy: str) -> Outcome:
    """One request after the other: match, make room, commit, release. Of a prompt longer than the cache its head."""
    now_s = 0.0
    cache = PrefixCache(
        num_slots=num_blocks,
        block_size=1,
        bytes_per_token=1,
        move_slots=lambda source, target, length: None,
        policy=policy,
        ttl_s=inf,
        clock=lambda: now_s,
    )
    num_hit = num_committed = 0
    begun_s = time.process_time()
    for prompt in trace.prompts:
        now_s = prompt.arrival_s
        token_ids = [*prompt.blocks[: prompt.num_matchable], _NO_MATCH_BEHIND]
        with cache.acquire(token_ids, scope=_SCOPE) as lease:
            num_hit += lease.num_cached_tokens
            end = min(len(prompt.blocks), num_blocks)
            if cache.reserve(lease, end, num_computed_tokens=lease.num_cached_tokens):
                num_committed += cache.commit(lease, prompt.blocks, num_computed_tokens=end)
    took_s = time.process_time() - begun_s
    num_evicted = cache.usage().num_evicted_blocks
    return Outcome(
        token_hit_rate=num_hit * trace.block_size / trace.num_tokens,
        num_evicted_blocks=num_evicted,
        block_operations_per_s=(num_hit + num_committed + num_evicted) / took_s,
    )


def ceiling(trace: Trace, *, num_blocks: int) -> float:
    """What a cache could reuse that knows the future: it keeps the blocks that are needed soonest (Belady 1966)."""
    next_uses = _next_uses(trace.prompts)
    kept: dict[int, tuple[float, int]] = {}
    latest: list[tuple[float, int, int]] = []  # negated, so that the one needed last pops first
    num_hit = 0
    for prompt, uses in zip(trace.prompts, next_uses, strict=True):
        for block in prompt.blocks[: prompt.num_matchable]:
            if block not in kept:
                break
            num_hit += 1
        for depth, (block, next_use) in enumerate(zip(prompt.blocks, uses, strict=True)):
            kept[block] = -next_use, -depth
            heappush(latest, (-next_use, -depth, block))
        while len(kept) > num_blocks:
            *key, block = heappop(latest)
            if kept.get(block) == tuple(key):
                del kept[block]
    return num_hit * trace.block_size / trace.num_tokens


def _next_uses(prompts: Sequence[Prompt]) -> list[list[float]]:
    """For every block of every prompt the number of the prompt that has it next."""
    seen: dict[int, int] = {}
    found: list[list[float]] = []
    for number in range(len(prompts) - 1, -1, -1):
        found.append([seen.get(block, inf) for block in prompts[number].blocks])
        seen.update(dict.fromkeys(prompts[number].blocks, number))
    return found[::-1]


def read_trace(file: str, *, block_size: int | None = None) -> Trace:
    """One prompt a line: timestamp (ms), input_length (tokens), hash_ids (names of its blocks).

    block_size: None finds the power of two that fits. Raises ConfigError.
    """
    try:
        packed = Path(file).read_bytes()
        text = gzip.decompress(packed) if packed.startswith(b"\x1f\x8b") else packed
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        rows.sort(key=lambda row: float(row["timestamp"]))
        size = block_size or _block_size(rows)
        numbers: dict[tuple[int, Any], int] = {}
        prompts = [_prompt(row, size, numbers) for row in rows]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot replay {file}: {type(error).__name__}: {error}") from error
    if not sum(prompt.num_tokens for prompt in prompts):
        raise ConfigError(f"cannot replay {file}: it holds no prompt")
    return Trace(prompts, size)


def _prompt(row: dict[str, Any], block_size: int, numbers: dict[tuple[int, Any], int]) -> Prompt:
    num_tokens = int(row["input_length"])
    blocks: list[int] = []
    for name in row["hash_ids"][: num_tokens // block_size]:
        blocks.append(numbers.setdefault((blocks[-1] if blocks else 0, name), len(numbers) + 1))
    return Prompt(row["timestamp"] / 1000, num_tokens, blocks, min(len(blocks), (num_tokens - 1) // block_size))


def _block_size(rows: list[dict[str, Any]]) -> int:
    """Every prompt has a name for each whole block, and perhaps one for what is left."""
    for size in (1 << power for power in range(16)):
        if all(len(row["hash_ids"]) - row["input_length"] // size in (0, 1) for row in rows):
            return size
    raise ValueError("its block size does not follow from it, say it with --block-tokens")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)
