"""Pins keep a prefix through floods, within their bound, and never keep a request from running."""

from __future__ import annotations

import random

from kvreuse.engine.engine import Engine
from kvreuse.types import Done, Scope
from tests.engine.families import VOCAB
from tests.engine.harness import BLOCK, running_engine, send, tiny


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(2, VOCAB), k=length))


def slots(num_tokens: int) -> int:
    """Bytes of a pool for so many tokens of the tiny llama."""
    return num_tokens * 3 * 2 * (8 + 8) * 4


def num_cached(engine: Engine, token_ids: tuple[int, ...]) -> int:
    done = send(engine, token_ids, num_new=1).result()
    assert isinstance(done, Done), done
    return done.facts.cached_tokens


def pinned_slots(engine: Engine) -> int:
    pinned: int = engine.snapshot()["store"].pinned_slots
    return pinned


def test_a_pinned_prefix_outlives_a_flood_and_goes_after_its_unpin() -> None:
    kept = prompt(1, 4 * BLOCK + 1)
    with running_engine(tiny("llama"), kv_cache_memory_bytes=slots(16 * BLOCK), kv_cache_policy="lru") as engine:
        num_cached(engine, kept)
        lease = engine.pins.pin(kept, scope=Scope())
        for seed in range(20):
            num_cached(engine, prompt(100 + seed, 6 * BLOCK))
        assert num_cached(engine, kept) == 4 * BLOCK
        engine.pins.unpin(lease)
        for seed in range(20):
            num_cached(engine, prompt(200 + seed, 6 * BLOCK))
        assert num_cached(engine, kept) == 0


def test_pins_never_take_more_than_half_of_the_pool() -> None:
    with running_engine(tiny("llama"), kv_cache_memory_bytes=slots(32 * BLOCK)) as engine:
        leases = []
        for seed in range(6):
            token_ids = prompt(seed, 5 * BLOCK + 1)
            num_cached(engine, token_ids)
            leases.append(engine.pins.pin(token_ids, scope=Scope()))
            assert pinned_slots(engine) <= 16 * BLOCK
        assert pinned_slots(engine) >= 12 * BLOCK
        for lease in leases:
            engine.pins.unpin(lease)


def test_a_request_that_needs_what_pins_keep_gets_it() -> None:
    with running_engine(tiny("llama"), kv_cache_memory_bytes=slots(16 * BLOCK)) as engine:
        kept = prompt(1, 6 * BLOCK + 1)
        num_cached(engine, kept)
        engine.pins.pin(kept, scope=Scope())
        done = send(engine, prompt(2, 14 * BLOCK), num_new=4).result()
        assert isinstance(done, Done), done
        assert pinned_slots(engine) == 0


def test_a_request_that_grows_into_what_pins_keep_gets_it() -> None:
    with running_engine(tiny("llama"), kv_cache_memory_bytes=slots(16 * BLOCK)) as engine:
        kept = prompt(1, 6 * BLOCK + 1)
        num_cached(engine, kept)
        engine.pins.pin(kept, scope=Scope())
        answer = send(engine, prompt(2, 6 * BLOCK), num_new=9 * BLOCK)
        assert len(answer.tokens()) == 9 * BLOCK


def test_another_tenants_prefix_is_not_pinned() -> None:
    with running_engine(tiny("llama")) as engine:
        token_ids = prompt(1, 4 * BLOCK + 1)
        num_cached(engine, token_ids)
        lease = engine.pins.pin(token_ids, scope=Scope(tenant="b"))
        assert pinned_slots(engine) == 0
        engine.pins.unpin(lease)
        engine.pins.unpin(lease)
