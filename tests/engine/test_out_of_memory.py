"""What is said when pinned memory leaves no room for a request."""

from __future__ import annotations

from kvreuse.types import Scope
from tests.engine.test_scheduler import World


def test_the_error_tells_what_was_needed_what_there_is_and_what_to_change() -> None:
    world = World(num_slots=40)
    pin = world.cache.acquire([*range(33)], scope=Scope())
    world.cache.reserve(pin, 32, num_computed_tokens=0)
    world.cache.commit(pin, [*range(33)], num_computed_tokens=32)
    world.add("a", range(100, 120))
    batch, ((_, error),) = world.scheduler.schedule()
    assert batch == []
    assert error.message == (
        "KV_CACHE_OOM: 20 tokens need KV, the pool holds 40 and 32 of these are pinned; "
        "raise option.kv_cache_memory_ratio, pin less or send less"
    )
    world.cache.release(pin)
