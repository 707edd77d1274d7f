"""`kvreuse bench decode`: a decode step of many sequences on one prefix, shared and as private copies, in this process.

Drives the runner and the cache of a real engine by hand, so that a step holds exactly what it should. Knows nothing of
HTTP.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from kvreuse.config import Config, set_torch_defaults
from kvreuse.errors import ConfigError
from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.bench.report import Report, as_table, environment, ratio

if TYPE_CHECKING:
    from kvreuse.engine.parts import EngineParts
    from kvreuse.engine.scheduler import Scheduled

__all__ = ["add_flags", "make_items", "measure", "scheduled", "step"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("--sequences", type=at_least(1), default=32, metavar="N", help="sequences in a step")
    parser.add_argument("--prefix-tokens", type=at_least(1), default=2048, metavar="N", help="tokens they share")
    parser.add_argument("--steps", type=at_least(1), default=8, metavar="N", help="steps of each kind, interleaved")
    parser.add_argument("--threads", type=at_least(1), default=None, metavar="N", help="CPU threads, the default fits")
    parser.add_argument("--model", default="demo", help="model to run: demo, a folder or a hub id")
    parser.add_argument("--dtype", default="float32", help="type of weights and KV")
    parser.add_argument("--device", default="auto", help="where the model runs")
    parser.add_argument("--attention-backend", default="auto", metavar="NAME", help="as the option of this name")


def measure(args: argparse.Namespace) -> Report:
    """Median time of a step, shared and unshared; both must choose the same tokens. Raises ConfigError."""
    set_torch_defaults()
    from kvreuse.engine.parts import build  # torch takes seconds; flags are checked before

    parts = build(
        Config(
            model_id=args.model,
            dtype=args.dtype,
            device=args.device,
            attention_backend=args.attention_backend,
            num_threads=args.threads,
        )
    )
    prefix = [7 + i * 7919 % (parts.vocab_size - 7) for i in range(args.prefix_tokens)]
    _prefill(parts, prefix)
    batches = {True: _sequences(parts, prefix, args, is_shared=True), False: _sequences(parts, prefix, args)}
    step_ms: dict[bool, list[float]] = {True: [], False: []}
    is_equal = True
    for number in range(args.steps + 1):
        chosen = {}
        for is_shared in (True, False) if number % 2 else (False, True):
            chosen[is_shared], took_ms = step(parts, batches[is_shared])
            if number:  # the first of each kind warms up
                step_ms[is_shared].append(took_ms)
        is_equal = is_equal and chosen[True] == chosen[False]
    shared, unshared = (statistics.median(step_ms[kind]) for kind in (True, False))
    figures = {
        "sequences": args.sequences,
        "prefix_tokens": args.prefix_tokens,
        "steps": args.steps,
        "dtype": args.dtype,
        "shared_step_ms": round(shared, 3),
        "unshared_step_ms": round(unshared, 3),
        "shared_step_ms_all": [round(ms, 3) for ms in step_ms[True]],
        "unshared_step_ms_all": [round(ms, 3) for ms in step_ms[False]],
        "outputs_equal": is_equal,
        "environment": environment(),
    }
    what = f"decode step of {args.sequences} sequences on {args.prefix_tokens} tokens"
    table = as_table([(what, f"{unshared:.1f} ms", f"{shared:.1f} ms", ratio(unshared, shared))])
    fault = None if is_equal or args.dtype != "float32" else "shared and private copies chose different tokens"
    return Report(figures=figures, table=table, fault=fault)


def _prefill(parts: EngineParts, prefix: list[int]) -> None:
    """Compute the prefix once and commit it."""
    [item] = make_items(parts, [[*prefix, 1]], reuse=True)
    block_size = parts.cache.block_size
    for start in range(0, len(prefix), 512):
        num_tokens = min(512, len(prefix) - start)
        parts.runner.run([scheduled(item, num_tokens)])
        item.sequence.num_computed_tokens += num_tokens
    parts.cache.commit(item.lease, item.sequence.token_ids, num_computed_tokens=len(prefix) // block_size * block_size)
    parts.cache.release(item.lease)


def _sequences(
    parts: EngineParts, prefix: list[int], args: argparse.Namespace, *, is_shared: bool = False
) -> list[Scheduled]:
    """Sequences that have computed the prefix and are about to compute one token of their own."""
    prompts = [[*prefix, 3 + i % (parts.vocab_size - 3)] for i in range(args.sequences)]
    items = make_items(parts, prompts, reuse=is_shared, num_more=args.steps + 2)
    with parts.cache.acquire([*prefix, 1], scope=items[0].sequence.request.scope) as source:
        for item in items:
            done = item.lease.num_cached_tokens
            position = 0
            for slot, length in source.runs(source.num_cached_tokens):
                low = max(done - position, 0)
                if low < length:
                    parts.pool.move(slot + low, item.lease.slot(position + low), length - low)
                position += length
            item.sequence.num_computed_tokens = position
    for item in items:  # what is left of a prefix that is no whole number of blocks
        while item.sequence.num_uncomputed_tokens > 1:
            parts.runner.run([scheduled(item, item.sequence.num_uncomputed_tokens - 1)])
            item.sequence.num_computed_tokens = len(item.sequence.token_ids) - 1
    return items


def make_items(parts: EngineParts, prompts: list[list[int]], *, reuse: bool, num_more: int = 0) -> list[Scheduled]:
    """Sequences with their leases, nothing computed beyond what was cached. Raises ConfigError without room."""
    from kvreuse.engine.scheduler import Scheduled
    from kvreuse.engine.sequence import Answers, Sequence
    from kvreuse.types import Request

    items = []
    for number, prompt in enumerate(prompts):
        request = Request(request_id=str(number), token_ids=tuple(prompt), reuse=reuse)
        answers = Answers(request, lambda event: None, time.monotonic)
        sequence = Sequence.start(answers, number, tokenizer=parts.tokenizer, block_size=parts.cache.block_size)
        lease = parts.cache.acquire(prompt, scope=request.scope, reuse=reuse)
        if not parts.cache.reserve(lease, len(prompt) + num_more, num_computed_tokens=lease.num_cached_tokens):
            raise ConfigError(f"the KV pool of {parts.pool.num_slots} tokens is too small for private copies")
        sequence.lease, sequence.num_computed_tokens = lease, lease.num_cached_tokens
        items.append(Scheduled(sequence, lease, 1))
    return items


def scheduled(item: Scheduled, num_tokens: int) -> Scheduled:
    """The next so many tokens of the same sequence."""
    return type(item)(item.sequence, item.lease, num_tokens)


def step(parts: EngineParts, items: list[Scheduled]) -> tuple[dict[int, int], float]:
    """Compute one token of each; greedy next tokens by sequence number, and milliseconds."""
    started_s = time.perf_counter()
    sampled, logits = parts.runner.run(items)
    token_ids = logits.argmax(-1).tolist()
    took_ms = (time.perf_counter() - started_s) * 1e3
    chosen = {}
    for item, token_id in zip(sampled, token_ids, strict=True):
        item.sequence.num_computed_tokens += 1
        item.sequence.token_ids.append(token_id)
        chosen[item.sequence.index] = token_id
    return chosen, took_ms
