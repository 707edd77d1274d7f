"""`kvreuse bench policy`: a trace of prompts through the real prefix cache, without a model: what does eviction keep?

Knows traces in which every block of a prompt has a name. Knows nothing of tensors or engines.

A block of the trace is one slot of the cache, its name the token in it. Only whole blocks are kept and a prompt's last
token is never a hit, as in the engine.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from kvreuse.cache.policy import POLICIES
from kvreuse.cache.store import PrefixCache
from kvreuse.config import Config
from kvreuse.errors import ConfigError
from kvreuse.ops.bench.report import Report, environment
from kvreuse.ops.trace import Trace, read_trace
from kvreuse.types import Scope

__all__ = ["add_flags", "ceiling", "measure", "replay"]

_SCOPE = Scope()
_NO_MATCH_BEHIND = 0  # the token behind the whole blocks of a prompt; no block of a trace has this number
# The ceiling takes some seconds and 100 bytes per million of block names.
_MAX_NAMES_FOR_CEILING = 2_000_000


class _Prompt(NamedTuple):
    """`blocks`: numbers of its whole blocks. num_matchable: how many of them end before the last token."""

    arrival_s: float
    blocks: Sequence[int]
    num_matchable: int


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
    parser.add_argument("--block-tokens", type=_positive, default=0, metavar="N", help="of a block of the trace")


def measure(args: argparse.Namespace) -> Report:
    """The share of prompt tokens that each policy reused. Raises ConfigError for a trace that cannot be replayed."""
    trace = read_trace(args.trace, block_size=args.block_tokens, is_exact=True)
    if not trace.num_prompt_tokens:
        raise ConfigError(f"{args.trace} holds no prompt")
    num_blocks = args.capacity_tokens // trace.block_size
    if not num_blocks:
        raise ConfigError(f"--capacity-tokens {args.capacity_tokens} is less than a block of {trace.block_size} tokens")
    outcomes = {name: replay(trace, num_blocks=num_blocks, policy=name) for name in dict.fromkeys((args.policy, "lru"))}
    chosen = outcomes[args.policy]
    num_names = sum(len(request.blocks) for request in trace.requests)
    best = ceiling(trace, num_blocks=num_blocks) if num_names <= _MAX_NAMES_FOR_CEILING else None
    figures = {
        "policy": args.policy,
        "capacity_tokens": args.capacity_tokens,
        "block_tokens": trace.block_size,
        "num_requests": len(trace.requests),
        "prompt_tokens": trace.num_prompt_tokens,
        "token_hit_rate": round(chosen.token_hit_rate, 5),
        "lru_token_hit_rate": round(outcomes["lru"].token_hit_rate, 5),
        "ceiling_token_hit_rate": None if best is None else round(best, 5),
        "evicted_blocks": chosen.num_evicted_blocks,
        "block_operations_per_s": round(chosen.block_operations_per_s),
        "environment": environment(),
    }
    rows = {**{name: outcome.token_hit_rate for name, outcome in outcomes.items()}, "ceiling": best}
    title = f"prompt tokens reused of {trace.num_prompt_tokens:,}, cache of {args.capacity_tokens:,}"
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
    prompts = _prompts(trace)
    gc.freeze()  # the trace is not what is measured
    begun_s = time.process_time()
    for prompt in prompts:
        now_s = prompt.arrival_s
        token_ids = [*prompt.blocks, _NO_MATCH_BEHIND][: prompt.num_matchable + 1]
        with cache.acquire(token_ids, scope=_SCOPE) as lease:
            num_hit += lease.num_cached_tokens
            end = min(len(prompt.blocks), num_blocks)
            if cache.reserve(lease, end, num_computed_tokens=lease.num_cached_tokens):
                num_committed += cache.commit(lease, prompt.blocks, num_computed_tokens=end)
    took_s = time.process_time() - begun_s
    gc.unfreeze()
    num_evicted = cache.usage().num_evicted_blocks
    return Outcome(
        token_hit_rate=num_hit * trace.block_size / trace.num_prompt_tokens,
        num_evicted_blocks=num_evicted,
        block_operations_per_s=(num_hit + num_committed + num_evicted) / took_s,
    )


def ceiling(trace: Trace, *, num_blocks: int) -> float:
    """What a cache could reuse that knows the future: it keeps the blocks that are needed soonest (Belady 1966)."""
    prompts = _prompts(trace)
    next_uses = _next_uses(prompts)
    kept: dict[int, tuple[float, int]] = {}
    latest: list[tuple[float, int, int]] = []  # negated, so that the one needed last pops first
    num_hit = 0
    for prompt, uses in zip(prompts, next_uses, strict=True):
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
    return num_hit * trace.block_size / trace.num_prompt_tokens


def _prompts(trace: Trace) -> list[_Prompt]:
    found = []
    for request in trace.requests:
        blocks = request.blocks[: request.num_prompt_tokens // trace.block_size]
        num_matchable = min(len(blocks), (request.num_prompt_tokens - 1) // trace.block_size)
        found.append(_Prompt(request.arrival_s, blocks, num_matchable))
    return found


def _next_uses(prompts: Sequence[_Prompt]) -> list[list[float]]:
    """For every block of every prompt the number of the prompt that has it next."""
    seen: dict[int, int] = {}
    found: list[list[float]] = []
    for number in range(len(prompts) - 1, -1, -1):
        found.append([seen.get(block, inf) for block in prompts[number].blocks])
        seen.update(dict.fromkeys(prompts[number].blocks, number))
    return found[::-1]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)
