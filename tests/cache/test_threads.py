"""Eight threads match, pin, commit, evict, move and purge; nothing pinned is ever lost."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cache.harness import BLOCK, World

from kvreuse.types import Scope

NUM_THREADS = 8
SCOPES = [Scope(), Scope(tenant="t")]


@contextmanager
def fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(work: Callable[[int], None]) -> None:
    """Run work(thread number) in all threads; the first error is raised here."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(NUM_THREADS)]
    with fast_switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


def some_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randrange(1, 8 * BLOCK))]


def one_operation(world: World, rng: random.Random) -> None:
    dice, tokens, scope = rng.random(), some_prompt(rng), rng.choice(SCOPES)
    if dice < 0.02:
        world.cache.purge(tenant=rng.choice([None, "t"]))
    elif dice < 0.06:
        world.cache.compact()
    elif dice < 0.10:
        world.cache.expire()
    elif dice < 0.2:
        assert world.cache.peek(tokens, scope=scope) < len(tokens)
    elif dice < 0.5:
        with world.cache.acquire(tokens, scope=scope) as lease:
            world.check_lease(lease, tokens[: lease.num_cached_tokens])
            world.check_lease(lease, tokens[: lease.num_cached_tokens])
    else:
        with world.cache.acquire(tokens, scope=scope) as lease:
            if world.prefill(lease, tokens):
                more = [*tokens, *some_prompt(rng)]
                world.prefill(lease, more)
                world.check_lease(lease, tokens)


def test_eight_threads_never_see_a_wrong_slot_and_leave_the_store_whole() -> None:
    world = World(num_blocks=40)

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(250):
            one_operation(world, rng)

    in_threads(work)
    world.check()
    usage = world.cache.usage()
    assert (usage.private_slots, usage.pinned_slots) == (0, 0)
    assert usage.num_evicted_blocks > 0 and usage.num_purged_blocks > 0
    world.cache.purge()
    assert world.cache.usage().free_slots == usage.num_slots
    world.check()


def test_matchers_beside_an_evicting_writer_keep_what_they_pinned() -> None:
    world = World(num_blocks=24)
    hot = list(range(6 * BLOCK))
    world.run([*hot, 1])

    def work(number: int) -> None:
        rng = random.Random(number)
        for i in range(200):
            if number == 0:
                world.run([1000 + i, *some_prompt(rng)])
                continue
            cut = rng.randrange(1, len(hot) + 1)
            with world.cache.acquire([*hot[:cut], 7, 7, 7], scope=SCOPES[0]) as lease:
                world.check_lease(lease, [*hot[:cut], 7, 7, 7][: lease.num_cached_tokens])

    in_threads(work)
    world.check()
