"""Where a private span goes: in place, elsewhere, into room made by eviction or by moving what nobody uses."""

from __future__ import annotations

from cache.harness import BLOCK, SCOPE, World, prompt

from kvreuse.cache.lease import Lease


def occupy(world: World, num_slots: int) -> Lease:
    """A private span of num_slots."""
    lease = world.cache.acquire([1], scope=SCOPE, reuse=False)
    assert world.cache.reserve(lease, num_slots, num_computed_tokens=0)
    return lease


def test_a_span_with_free_slots_behind_it_grows_without_a_copy() -> None:
    world, tokens = World(), prompt(1, 1)
    with world.start(tokens) as lease:
        for token in range(20):
            tokens.append(token)
            assert world.prefill(lease, tokens)
        assert len(lease.runs(len(tokens))) == 1
        assert world.num_copied == 0
        world.check()
    world.check()


def test_a_hit_is_continued_right_behind_its_run_when_that_is_free() -> None:
    world, tokens = World(), prompt(1, 3, extra=0)
    world.run([*tokens, 1])
    with world.start([*tokens, 1, 2, 3]) as lease:
        assert len(lease.runs(len(tokens) + 3)) == 1
    world.check()


def test_a_span_that_cannot_grow_moves_and_keeps_its_computed_tokens() -> None:
    world, tokens = World(), prompt(1, 1, extra=2)
    lease = world.cache.acquire(tokens, scope=SCOPE)
    assert world.prefill(lease, tokens)
    wall = occupy(world, BLOCK)
    assert world.cache.reserve(lease, len(tokens) + 3, num_computed_tokens=len(tokens))
    world.check_lease(lease, tokens)
    assert world.num_copied == 2
    world.check()
    for held in (lease, wall):
        world.cache.release(held)
    assert world.cache.usage().private_slots == 0
    world.check()


def test_a_span_slides_into_the_hole_before_it_when_no_other_is_long_enough() -> None:
    world = World(num_blocks=4)
    front, tokens = occupy(world, 2 * BLOCK), prompt(1, 0, extra=3)
    lease = world.cache.acquire(tokens, scope=SCOPE)
    assert world.prefill(lease, tokens, commit=False)
    back = occupy(world, 2 * BLOCK - 3)
    world.cache.release(front)
    assert world.cache.reserve(lease, 2 * BLOCK + 3, num_computed_tokens=3)
    world.check_lease(lease, tokens)
    world.check()
    world.cache.release(back)


def test_scattered_free_slots_are_joined_without_evicting() -> None:
    world = World(num_blocks=8)
    walls = [occupy(world, BLOCK) for _ in range(4)]
    world.cache.release(walls[1])
    world.cache.release(walls[3])
    prompts = [prompt(first, 1) for first in (1, 2)]
    for tokens in prompts:
        world.run(tokens)
    world.cache.release(walls[0])
    world.cache.release(walls[2])
    tokens = prompt(3, 6, extra=0)
    with world.start(tokens):
        assert world.cache.usage().num_evicted_blocks == 0
        assert world.cache.usage().num_moves > 0
        assert [world.cached(tokens) for tokens in prompts] == [1, 1]
        world.check()
    world.check()


def test_a_request_alone_can_use_the_whole_pool_wherever_its_own_blocks_lie() -> None:
    world, tokens = World(num_blocks=8), prompt(1, 1)
    wall = occupy(world, 3 * BLOCK)
    lease = world.cache.acquire(tokens, scope=SCOPE)
    assert world.prefill(lease, tokens)
    world.cache.release(wall)
    whole = [*tokens, *range(7 * BLOCK - 1)]
    assert len(whole) == 8 * BLOCK
    assert world.prefill(lease, whole)
    assert world.cache.usage().free_slots == 0
    world.check_lease(lease, whole)
    world.check()
    world.cache.release(lease)
    world.check()


def test_a_long_growing_sequence_uses_the_whole_pool_token_by_token() -> None:
    world, tokens = World(num_blocks=8), prompt(1, 1)
    for first in range(2, 6):
        world.run(prompt(first, 1 + first % 3))
    with world.start(tokens) as lease:
        while len(tokens) < 8 * BLOCK:
            tokens.append(len(tokens))
            assert world.prefill(lease, tokens)
            world.check()
        assert not world.cache.reserve(lease, 8 * BLOCK + 1, num_computed_tokens=len(tokens))
        world.check_lease(lease, tokens)
    world.check()


def test_what_another_request_holds_stays_in_place_and_a_refusal_changes_nothing() -> None:
    world = World(num_blocks=8)
    gap = occupy(world, 3 * BLOCK)
    running = prompt(1, 1)
    with world.start(running) as other:
        world.cache.release(gap)
        runs, copied = other.runs(len(running)), world.num_copied
        with world.cache.acquire([1], scope=SCOPE) as lease:
            assert not world.cache.reserve(lease, 5 * BLOCK, num_computed_tokens=0)
            assert lease.room_end == 0
            assert (other.runs(len(running)), world.num_copied) == (runs, copied)
            assert world.cache.usage().num_oom == 1
            assert world.cache.reserve(lease, 3 * BLOCK, num_computed_tokens=0)
        world.check_lease(other, running)
        world.check()
    world.check()


def test_compaction_leaves_one_hole_behind_the_unpinned_nodes() -> None:
    world = World(num_blocks=16)
    for first in range(1, 8):
        world.run(prompt(first, 2))
    for first in (2, 4, 6):
        world.clock.now += 1
        world.run(prompt(first, 2))
    walls = occupy(world, 3 * BLOCK)
    world.cache.release(walls)
    world.check()
    assert world.cache.usage().num_evicted_blocks == 1
    before = [world.cached(prompt(first, 2)) for first in range(1, 8)]
    world.cache.compact()
    usage = world.cache.usage()
    assert usage.largest_free_slots == usage.free_slots > 0
    assert [world.cached(prompt(first, 2)) for first in range(1, 8)] == before
    assert world.cache.compact() == 0
    world.check()


def test_trim_gives_back_the_slots_behind_a_position() -> None:
    world, tokens = World(num_blocks=8), prompt(1, 2)
    with world.start(tokens) as lease:
        assert world.cache.reserve(lease, 7 * BLOCK, num_computed_tokens=len(tokens))
        world.cache.trim(lease, len(tokens))
        assert (lease.room_end, world.cache.usage().private_slots) == (len(tokens), 1)
        world.check_lease(lease, tokens)
        world.cache.trim(lease, 0)
        assert (lease.room_end, world.cache.usage().private_slots) == (2 * BLOCK, 0)
        world.check()
    world.check()


def test_release_is_idempotent_and_gives_everything_back() -> None:
    world = World(num_blocks=8)
    lease = world.start(prompt(1, 2))
    world.cache.release(lease)
    world.cache.release(lease)
    usage = world.cache.usage()
    assert (usage.private_slots, usage.pinned_slots, usage.node_slots) == (0, 0, 2 * BLOCK)
    world.check()


def test_steady_pressure_with_mixed_sizes_evicts_about_what_it_needs() -> None:
    world = World(num_blocks=256)
    num_wanted = 0
    for i in range(400):
        num_blocks = 1 + (i * 7) % 23
        world.run(prompt(i + 1, num_blocks, extra=1 + i % (BLOCK - 1)))
        num_wanted += num_blocks
        world.check()
    usage = world.cache.usage()
    assert usage.num_evicted_blocks + usage.num_blocks == num_wanted
    assert usage.num_blocks >= 256 - 32
    assert world.num_copied <= 2 * num_wanted * BLOCK
